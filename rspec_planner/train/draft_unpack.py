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
Checkpoint folders from the packs of a comparison.

`python -m rspec_planner.train.draft_unpack GRID_OUT --run dflash-l2-b16-w8-flat/s0 --out FOLDER`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any

from rspec_planner.errors import ConfigurationError, EngineError, RspecError


def unpack(grid: str | Path, run: str, out: str | Path, revision: str = '') -> dict[str, Any]:
    """
    Write the draft of one run of a comparison to the folder `out`; return its manifest.

    ConfigurationError when the comparison holds no weights of such a run, EngineError when its
    files cannot be read.
    """
    from safetensors import safe_open, SafetensorError

    from rspec_planner.model.draft import DraftConfig
    from rspec_planner.model.draft_checkpoint import build_draft, save_draft
    from rspec_planner.train.draft_grid import RESULTS_FILE
    folder = Path(grid)
    try:
        content = json.loads((folder / RESULTS_FILE).read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise EngineError(f'{folder / RESULTS_FILE}: cannot be read ({error}); give the --out of '
                          'a comparison') from None
    held = {record['run']: record for record in content['runs'] if 'weights' in record}
    if run not in held:
        raise ConfigurationError(f'run {run!r}: no weights of it in {folder}; '
                                 f'choose one of {", ".join(held)}')
    record = held[run]
    draft = build_draft(DraftConfig.from_dict(record['config']))
    try:
        with safe_open(folder / record['weights'], 'pt') as pack:
            weights = {key[len(run) + 1:]: pack.get_tensor(key) for key in pack.keys()
                       if key.startswith(f'{run}:')}
        draft.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise EngineError(f'{folder / record["weights"]}: does not hold {run} '
                          f'({str(error).splitlines()[0]}); run the comparison again') from None
    splits = {split: {key: value for key, value in report.items() if key != 'per_clip'}
              for split, report in record['splits'].items()}
    manifest = {'kind': 'draft', 'name': record['name'], 'revision': revision,
                'target': content['target'], 'splits': splits,
                'L': {split: report['L'] for split, report in splits.items()},
                **{key: record[key] for key in ('seed', 'settings', 'parameters', 'steps',
                                                'clips', 'train_s', 'curve')}}
    save_draft(draft, out, manifest)
    return manifest


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(prog='draft_unpack', description=(
        'Write the draft of one run of a comparison as a checkpoint folder.'))
    parser.add_argument('grid', type=Path, help='the --out of a comparison')
    parser.add_argument('--run', required=True, help='such as dflash-l2-b16-w8-flat/s0')
    parser.add_argument('--out', type=Path, required=True, help='checkpoint folder to write')
    parser.add_argument('--revision', default='', help='git revision for the manifest')
    options = parser.parse_args(arguments)
    try:
        manifest = unpack(options.grid, options.run, options.out, options.revision)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(json.dumps({'run': options.run, 'out': str(options.out), 'L': manifest['L']}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
