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
"""
Record how many tokens a trained draft commits, for benches of profiles without one.

python -m rspec_planner.evaluate.acceptance_trace OUT [DRAFT] [CLIPS]
"""

from __future__ import annotations

import json
from pathlib import Path
import sys

from rspec_planner.evaluate.clips import render_clips
from rspec_planner.planner.pipeline import Planner
from rspec_planner.world.generate import clip_observation
from rspec_planner.world.splits import split_specs

DRAFT = 'dflash-l2-b16-w8-flat'  # the block of the bench


def record(draft: str, clips: int) -> dict[str, object]:
    """Return the trace of the tiny profile on clips of the validation split, stateless."""
    planner = Planner.load('tiny', draft=draft)
    cameras, kept = planner.profile.cameras, []
    for clip in render_clips(split_specs('val', clips), cameras.width, cameras.height, workers=0):
        reasoning = planner.plan(clip_observation(clip)).reasoning
        kept.append({'tokens': len(reasoning.token_ids),
                     'committed': list(reasoning.stats.committed)})
    return {'name': f'tiny profile, val split, {planner.draft_name}', 'frames': kept}


def main(arguments: list[str]) -> int:
    """Write the trace."""
    out, draft, clips = [*arguments, *[DRAFT, '60'][max(len(arguments) - 1, 0):]][:3]
    Path(out).write_text(json.dumps(record(draft, int(clips))) + '\n', encoding='utf-8')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
