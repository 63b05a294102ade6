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

python -m rspec_planner.evaluate.acceptance_trace OUT [DRAFT] [FRAMES]
"""

from __future__ import annotations

import json
from pathlib import Path
import sys

from rspec_planner.evaluate.bench import drive_observations
from rspec_planner.planner.pipeline import Planner

#: frames of a drive between two that are kept, so that the same scene does not fill the trace
APART = 5


def record(draft: str, frames: int, seed: int = 1) -> dict[str, object]:
    """Return the trace of the tiny profile on every fifth frame of a drive, stateless."""
    planner = Planner.load('tiny', draft=draft)
    cameras = planner.profile.cameras
    kept = []
    for index, observation in enumerate(drive_observations(
            frames * APART, cameras.width, cameras.height, cameras.names, seed)):
        if index % APART:
            continue
        reasoning = planner.plan(observation).reasoning
        kept.append({'tokens': len(reasoning.token_ids),
                     'committed': list(reasoning.stats.committed)})
    return {'name': f'tiny profile, {planner.draft_name}', 'frames': kept}


def main(arguments: list[str]) -> int:
    """Write the trace."""
    out, draft, frames = [*arguments, 'default', '60'][:3] if len(arguments) < 2 else [
        *arguments, '60'][:3]
    Path(out).write_text(json.dumps(record(draft, int(frames)), indent=1) + '\n',
                         encoding='utf-8')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
