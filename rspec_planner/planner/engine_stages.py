# Copyright 2026 rspec_planner authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The planner's stages over exported graphs, whichever kind of executor runs them."""

from __future__ import annotations

from dataclasses import replace

from rspec_planner.engine.stage_buffers import make_stage, Maker, shared_buffers
from rspec_planner.engine.stages import StageSet
from rspec_planner.errors import EngineError
from rspec_planner.model.draft import Draft, DraftConfig
from rspec_planner.model.target import Target
from rspec_planner.planner.pipeline import StageMaker, Stages
from rspec_planner.planner.reasoner import Reasoner


def graph_stages(stages: StageSet, make: Maker) -> StageMaker:
    """
    Return what the planner builds its stages with, for one export folder.

    make: loads the executor of one graph. The result raises EngineError when the planner needs
    other sizes or another draft than the graphs were exported for.
    """
    def build(target: Target, capacity: int, samples: int, budget: int,
              draft: Draft | None = None) -> Stages:
        _check(stages, capacity, samples, draft)
        shared = shared_buffers(stages, target, draft)
        reasoner = Reasoner(target, shared.cache, budget=budget)
        shared = replace(shared, tokens=reasoner.state.tokens)
        made = {stage.name: make_stage(stage, stages, shared, make) for stage in stages.stages}
        reasoner.verify, reasoner.draft = made['verify'], made.get('draft')
        return Stages(vision=made['vision'], prefill=made['prefill'], reasoner=reasoner,
                      flow_step=made['flow_step'])

    return build


def _check(stages: StageSet, capacity: int, samples: int, draft: Draft | None) -> None:
    """Raise EngineError when the planner asks for what the graphs do not have."""
    shapes = stages.shapes
    if capacity > shapes.capacity or samples != shapes.samples:
        raise EngineError(f'the graphs hold {shapes.capacity} rows and {shapes.samples} samples, '
                          f'the planner needs {capacity} and {samples}: export them for it')
    held = None if stages.draft is None else DraftConfig.from_dict(dict(stages.draft))
    given = None if draft is None else draft.cfg
    if held != given:
        raise EngineError(f'the graphs were exported with draft {held and held.name}, the '
                          f'planner has {given and given.name}: export them with this draft')
