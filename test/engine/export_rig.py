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
"""A target, its drafts and their exports, so small that every test can afford them."""

from dataclasses import replace

from draft_reference import randomise, small_draft, small_profile
import torch

from rspec_planner.engine.export import export_stages
from rspec_planner.evaluate.engine_numerics import check_stages, random_case
from rspec_planner.model.target import Target
from rspec_planner.planner.reasoner import tapped_tail
from rspec_planner.planner.staging import Source, stage_shapes

TEXT_ROOM, BUDGET = 24, 6


def camera_profile():
    """Return the small profile with four images of two visual tokens each."""
    profile = small_profile()
    return replace(profile, cameras=replace(profile.cameras, frames=1, height=32, width=64),
                   vision=replace(profile.vision, depth=2, deepstack_layers=(0, 1)))


def camera_target(seed=0, dtype=torch.float32):
    target = Target(camera_profile())
    randomise(target, seed)
    return target.eval().requires_grad_(False).to(dtype)


def source_of(target, kind='dflash', samples=1, **over):
    """Return a target with a draft of some kind, or none for ''."""
    draft = small_draft(target, kind, **over).to(target.dtype) if kind else None
    if draft is not None:
        draft.bind(target.text, target.cfg.tokens)
    visual = target.cfg.tokens_per_image * len(target.cfg.cameras.names)
    shapes = stage_shapes(target.cfg, draft, visual + TEXT_ROOM, samples=samples, budget=BUDGET,
                          tail=tapped_tail(draft, target) if draft is not None else 1)
    return Source(target, draft, shapes, {'target': 'one', 'draft': 'two'})


def exported(source, folder, precision='fp32', **options):
    return export_stages(source.target, source.draft, source.shapes, precision,
                         source.checkpoints, folder, **options)


def errors_of(source, stages, folder, seeds=range(4)):
    """Return stage -> worst error over random frames."""
    cases = [random_case(source.target.cfg, stages, seed) for seed in seeds]
    found = check_stages(stages, folder, source.target, source.draft, cases)
    return {name: error for name, (error, _) in found.worst.items()}
