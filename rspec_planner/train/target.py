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
Front of `rspec train target`: `python -m rspec_planner.train.target --out DIR`.

Render workers import this module again when they start, so nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
import sys
import time
from typing import Any

from rspec_planner.errors import ConfigurationError, RspecError
from rspec_planner.train.settings import add_options, load_settings, TargetSettings

#: what `--smoke` changes: a handful of clips, 20 steps, seconds on a laptop
SMOKE = {'minutes': 2.0, 'reserve_s': 20.0, 'warmup_s': 1.0, 'max_steps': 20, 'workers': 1,
         'pool_clips': 16, 'start_clips': 8, 'train_clips': 8, 'val_clips': 4,
         'val_drive_clips': 4, 'extra_clips': False, 'batch_clips': 4, 'precision': 'fp32',
         'flow_samples': 2,
         'evaluate_every_s': 1e9, 'checkpoint_every_s': 1e9}


def train_target(config_path: str | Path | None, out_dir: str | Path, *,
                 init_from: str | Path | None = None, resume: bool = False,
                 smoke: bool = False, state_dir: str | Path | None = None,
                 revision: str = '', started: float | None = None,
                 **overrides: Any) -> dict[str, Any]:
    """
    Train the target and leave OUT/checkpoint ready for `Planner.load`.

    config_path: YAML of `TargetSettings` or None for the defaults; overrides: single settings.
    init_from: checkpoint folder whose weights to start from; resume: continue the state in
    state_dir (default OUT); started: `time.monotonic()` at which the minutes began.
    Returns steps, loss, checkpoint and the validation metrics.
    """
    if smoke:
        overrides = {**SMOKE, **{k: v for k, v in overrides.items() if v is not None}}
    started = time.monotonic() if started is None else started
    settings = load_settings(config_path, **overrides)
    if resume and init_from is not None:
        raise ConfigurationError('--resume and --init-from exclude each other; give one')
    # one thread for each render worker; they inherit the environment
    for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
        os.environ.setdefault(name, '1')
    from rspec_planner.train.loop import TargetTrainer
    out = Path(out_dir)
    return TargetTrainer(settings, out, Path(state_dir or out), smoke=smoke,
                         init_from=None if init_from is None else Path(init_from),
                         resume=resume, revision=revision, started=started).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='rspec train target', description=(
        'Train the target on the embedded world; one process per GPU under torchrun.'))
    parser.add_argument('--config', type=Path, help='YAML of training settings')
    parser.add_argument('--out', type=Path, required=True, help='receives checkpoint/ and logs')
    parser.add_argument('--state-dir', type=Path, help='resume file lies here (default: --out)')
    parser.add_argument('--init-from', type=Path, help='start from these weights')
    parser.add_argument('--resume', action='store_true', help='continue the saved state')
    parser.add_argument('--smoke', action='store_true', help='20 steps of a toy size')
    parser.add_argument('--revision', default='', help='git revision for the manifest')
    add_options(parser, TargetSettings)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the last line of stdout is one JSON object."""
    started = time.monotonic()  # importing torch from a cold disk counts as well
    options = vars(_parser().parse_args(arguments))
    config, out = options.pop('config'), options.pop('out')
    try:
        result = train_target(config, out, started=started, **options)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    if int(os.environ.get('RANK', 0)) == 0:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
