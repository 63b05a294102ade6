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
One file of several comparisons: `python -m rspec_planner.train.draft_join A.json B.json --out C`.

A run that was trained for other epochs than the base is another draft, so its name says so. The
curves of tuning runs, which nobody reads again, are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import json
from pathlib import Path
import sys
from typing import Any

from rspec_planner.errors import ConfigurationError, InputError, RspecError

BASE_EPOCHS = 20.0
_WORDS = {2.0: 'two', 6.0: 'six', 20.0: 'twenty', 40.0: 'forty'}
_ORDINALS = ('first', 'second', 'third', 'fourth')


def named_run(run: dict[str, Any], base_epochs: float = BASE_EPOCHS) -> dict[str, Any]:
    """Return a run whose name tells its epochs unless they are the base's or a tag has them."""
    if 'settings' not in run:
        return run  # it failed
    epochs, name = float(run['settings']['epochs']), str(run['name'])
    tag = name.partition('+')[2]
    known = epochs == base_epochs or 'epochs' in tag or tag.endswith(f'-e{epochs:g}')
    found = {key: value for key, value in run.items()
             if key != 'curve' or run['group'] != 'tune'}
    if not known:
        name = f'{name}+{_WORDS.get(epochs, f"{epochs:g}")}-epochs'
        found.update(name=name, run=f'{name}/s{run["seed"]}')
    return found


def join(paths: Sequence[Path], commands: Sequence[str] = (),
         base_epochs: float = BASE_EPOCHS) -> dict[str, Any]:
    """
    Return the comparisons of several result files as one; machine and data are the first's.

    commands: how each was made, for files that do not say it; base_epochs: those that a name
    need not tell. ConfigurationError for another target, another number of commands, a run that
    two files hold or too many files; InputError names a file that cannot be read.
    """
    if not 1 <= len(paths) <= len(_ORDINALS):
        raise ConfigurationError(f'{len(paths)} files: join 1 to {len(_ORDINALS)}')
    if commands and len(commands) != len(paths):
        raise ConfigurationError(f'{len(commands)} commands for {len(paths)} files: give one each')
    contents = [_read(path) for path in paths]
    if len({content['target'] for content in contents}) > 1:
        raise ConfigurationError(f'{", ".join(map(str, paths))}: made with different targets; '
                                 'join comparisons of one target')
    runs = [named_run(run, base_epochs) for content in contents for run in content['runs']]
    keys = [run['run'] for run in runs if 'settings' in run]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigurationError(f'{twice[0]}: in more than one file; leave one of them out')
    kept = {key: value for key, value in contents[0].items()
            if key not in ('runs', 'not_finished', 'command')}
    return {**kept,
            'commands': list(commands) or [content.get('command', '') for content in contents],
            'runs': runs,
            'not_finished': dict(zip(_ORDINALS, (content['not_finished']
                                                 for content in contents)))}


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise InputError(f'{path}: cannot be read ({error}); give the results.json of a '
                         'comparison') from None
    return content


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(prog='draft_join', description=(
        'Join the results of several comparisons into one file.'))
    parser.add_argument('results', type=Path, nargs='+', help='results.json of each')
    parser.add_argument('--out', type=Path, required=True, help='file to write')
    parser.add_argument('--command', action='append', default=[],
                        help='how each was made, in order, for files that do not say it')
    parser.add_argument('--base-epochs', type=float, default=BASE_EPOCHS,
                        help='runs of other epochs get them into their name')
    options = parser.parse_args(arguments)
    try:
        content = join(options.results, options.command, options.base_epochs)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(content), encoding='utf-8')
    print(json.dumps({'runs': len(content['runs']), 'out': str(options.out)}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
