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
"""How a subcommand reports: --json or lines for people, and bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
import functools
import inspect
import json
import os
from pathlib import Path
import sys
from typing import Any

import click

#: a subcommand: options in, report out
Command = Callable[..., Any]

CONTEXT = {'help_option_names': ['-h', '--help'], 'max_content_width': 96}


def _plain(value: Any) -> Any:
    """Return what json cannot write itself: paths, numpy scalars and arrays, tuples of them."""
    if hasattr(value, 'tolist'):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f'{type(value).__name__} in a report')


def _lines(value: Any, indent: str = '') -> Iterator[str]:
    """Yield a report as indented `key: value` lines."""
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            yield f'{indent}{key}:'
            yield from _lines(entry, indent + '  ')
        elif isinstance(entry, list | tuple):
            yield f'{indent}{key}:' + ('' if entry else ' none')
            for item in entry:
                yield f'{indent}  - ' + (', '.join(f'{k} {v}' for k, v in item.items())
                                         if isinstance(item, Mapping) else str(item))
        else:
            text = f'{entry:.4g}' if isinstance(entry, float) else str(entry)
            yield f'{indent}{key}: {text}'


def reports(lines: Callable[[Any], Iterator[str]] = _lines) -> Callable[[Command], Command]:
    """Give a subcommand --json and print what it returns, for people by `lines`."""
    def decorate(function: Command) -> Command:
        @click.option('--json', 'as_json', is_flag=True,
                      help='Print one JSON object as the last line of stdout.')
        @functools.wraps(function)
        def wrapper(*args: Any, as_json: bool, **options: Any) -> None:
            if 'as_json' in inspect.signature(function).parameters:
                options['as_json'] = as_json
            result = function(*args, **options)
            plain = json.dumps(result, default=_plain)
            if os.environ.get('RANK', '0') != '0':
                return  # under torchrun one process speaks for all
            click.echo(plain if as_json else '\n'.join(lines(json.loads(plain))))
            if result.get('ok') is False:
                raise click.exceptions.Exit(1)
        return wrapper
    return decorate


@contextmanager
def progress(total: int | None, label: str) -> Iterator[Callable[[], object]]:
    """Show a bar on stderr while it is a terminal; yield the function that moves it by one."""
    from tqdm import tqdm
    with tqdm(total=total, desc=label, file=sys.stderr, disable=None, leave=False) as bar:
        yield bar.update


@contextmanager
def share(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar like `progress`; yield a function of how many of how many are done."""
    from tqdm import tqdm
    with tqdm(desc=label, file=sys.stderr, disable=None, leave=False) as bar:
        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
        yield show
