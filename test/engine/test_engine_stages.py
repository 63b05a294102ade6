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
"""What the planner asks of exported graphs, and what it refuses of others."""

from dataclasses import asdict
from types import SimpleNamespace

from export_rig import camera_target, source_of
import pytest

from rspec_planner.engine.stages import Port, StageFile, StageSet
from rspec_planner.errors import EngineError
from rspec_planner.planner import engine_stages
from rspec_planner.planner.engine_stages import graph_stages

NAMES = ('vision', 'prefill', 'draft', 'verify', 'flow_step')


def stage_set(source):
    files = tuple(StageFile(name, f'{name}.onnx', '', 1, 24, (Port('x', 'float32', (1,)),), ())
                  for name in NAMES if name != 'draft' or source.draft is not None)
    return StageSet('small', {}, None if source.draft is None else asdict(source.draft.cfg),
                    'fp32', source.shapes, {}, {}, files)


@pytest.fixture
def asked(monkeypatch):
    """Record what is made of each graph in the place of an executor."""
    calls = []

    def made(stage, stages, shared, make):
        calls.append((stage.name, shared, make))
        return SimpleNamespace(name=stage.name)
    monkeypatch.setattr(engine_stages, 'make_stage', made)
    return calls


@pytest.mark.parametrize('kind', ['dflash', ''])
def test_each_graph_takes_the_place_of_its_stage(asked, kind):
    source = source_of(camera_target(), kind)
    shapes = source.shapes
    made = graph_stages(stage_set(source), 'maker')(
        source.target, shapes.capacity, 1, 6, source.draft)
    assert (made.vision.name, made.prefill.name, made.flow_step.name) == (
        'vision', 'prefill', 'flow_step')
    assert made.reasoner.verify.name == 'verify'
    assert (made.reasoner.draft is None) is (kind == '')
    assert [name for name, *_ in asked] == [name for name in NAMES if name != 'draft' or kind]
    assert {make for *_, make in asked} == {'maker'}
    assert len({id(shared) for _, shared, _ in asked}) == 1  # one cache for all of them
    shared = asked[0][1]
    assert shared.tokens is made.reasoner.state.tokens  # the loop's own text
    assert shared.cache.keys.shape[3] == shapes.capacity


def test_a_planner_may_need_less_room_but_not_more(asked):
    source = source_of(camera_target(), '')
    build, rows = graph_stages(stage_set(source), 'maker'), source.shapes.capacity
    build(source.target, rows - 1, 1, 6)
    with pytest.raises(EngineError, match=f'hold {rows} rows and 1 samples, the planner needs '
                                          f'{rows + 1} and 1: export them for it'):
        build(source.target, rows + 1, 1, 6)
    with pytest.raises(EngineError, match='1 samples, the planner needs .* and 6'):
        build(source.target, rows, 6, 6)
    assert len(asked) == 4  # nothing was made for a planner that was refused


def test_graphs_of_another_draft_are_refused(asked):
    source = source_of(camera_target(), 'dflash', block=4)
    other = source_of(camera_target(), 'dflash', block=5)
    build, rows = graph_stages(stage_set(source), 'maker'), source.shapes.capacity
    with pytest.raises(EngineError, match='exported with draft .*, the planner has'):
        build(source.target, rows, 1, 6, other.draft)
    with pytest.raises(EngineError, match='the planner has None: export them with this draft'):
        build(source.target, rows, 1, 6, None)
    assert not asked
