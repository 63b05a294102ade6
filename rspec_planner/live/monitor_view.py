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
A snapshot of the monitor as lines of a terminal: what is thought, how long it took, what ails.

Colours are ANSI and left out where the text goes to a file. Nothing here knows ROS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import shutil
from typing import Any, TextIO

#: name in the latency diagnostic -> words; the parts add up to the first line
TIMES = {'processing': 'processing', 'wait': '  wait for inputs', 'images': '  decode images',
         'select': '  choose by time', 'preprocess': '  preprocess', 'encode': '  encode',
         'prefill': '  prefill', 'decode': '  decode', 'action': '  action',
         'postprocess': '  postprocess',
         'pipeline_latency': 'since t0', 'cyclic': 'between plans'}
_COLOURS = {'OK': 32, 'WARN': 33, 'ERROR': 31, 'STALE': 35}
_BAR = 24  # characters


def view(state: Mapping[str, Any], *, colour: bool = False) -> list[str]:
    """Return a snapshot as lines for a terminal."""
    return [*_head(state), '', *_latency(state), '', *_decoding(state), *_inputs(state),
            *_cycles(state), '', *_health(state, colour)]


def refresh(stream: TextIO, state: Mapping[str, Any]) -> None:
    """Redraw in place on a terminal, as wide as it is; elsewhere append a block."""
    if not stream.isatty():
        print('\n'.join(view(state)), file=stream, flush=True)
        return
    size = shutil.get_terminal_size()
    lines = [_clip(line, size.columns) for line in view(state, colour=True)][:size.lines - 1]
    # each line is overwritten and its rest erased: clearing the screen first would flicker
    stream.write('\x1b[H' + ''.join(f'{line}\x1b[K\n' for line in lines) + '\x1b[J')
    stream.flush()


def _clip(line: str, columns: int) -> str:
    """Cut a line to the terminal; only health lines hold escapes, in their first word."""
    escapes = 9 if line.startswith('\x1b[') else 0
    return line if len(line) - escapes <= columns else line[:columns + escapes - 1] + '…'


def _head(state: Mapping[str, Any]) -> Iterator[str]:
    yield (f'{state["namespace"]}   {state["plans"]} plans   {state["rate_hz"]:.1f} Hz')
    if state['t0_ns'] is None:
        yield 'no plan seen yet'
        return
    sure = '' if state['confidence'] is None else f'   (p {state["confidence"]:.2f})'
    yield f'"{state["reasoning"]}"{sure}'
    yield (f't0 {state["t0_ns"] / 1e9:.3f}   age {state["age_ms"]:.0f} ms   '
           f'{state["speed_mps"]:.1f} m/s   end {state["end_m"][0]:.1f} m ahead, '
           f'{state["end_m"][1]:+.1f} m left')


def _latency(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the times, each with a bar of its median."""
    yield f'{"milliseconds":<20}{"now":>7}{"p50":>7}{"p95":>7}{"p99":>7}'
    longest = max((times['p50'] for times in state['times_ms'].values()), default=0.0)
    for name, words in TIMES.items():
        times = state['times_ms'].get(name)
        if times is None:
            continue
        bar = '█' * round(_BAR * times['p50'] / longest) if longest else ''
        numbers = ''.join(f'{times[key]:7.1f}' for key in ('now', 'p50', 'p95', 'p99'))
        yield f'{words:<20}{numbers}  {bar}'.rstrip()


def _decoding(state: Mapping[str, Any]) -> Iterator[str]:
    yield (f'accepted     {state["accepted_length"]:.2f} tokens per iteration, '
           f'{state["iterations"]:.0f} iterations, {state["reused_tokens"]:.0f} reused, '
           f'{state["tokens_per_second"]:.0f} tokens/s')


def _inputs(state: Mapping[str, Any]) -> Iterator[str]:
    streams = '   '.join(f'{name} {stream["rate_hz"]:.1f} Hz {stream["age_ms"]:.0f} ms'
                         for name, stream in state['inputs'].items())
    yield f'inputs       {streams or "nothing known"}'


def _cycles(state: Mapping[str, Any]) -> Iterator[str]:
    counts = '   '.join(f'{name} {count}' for name, count in state['counts'].items())
    yield f'cycles       {counts or "nothing known"}'
    skips = ', '.join(f'{reason} {count}' for reason, count in state['skipped'].items())
    yield f'skipped      {skips or "none"}'


def _health(state: Mapping[str, Any], colour: bool) -> Iterator[str]:
    for task, entry in state['diagnostics'].items():
        level = f'{entry["level"]:<6}'
        if colour:
            level = f'\x1b[{_COLOURS[entry["level"]]}m{level}\x1b[0m'
        yield f'{level}{task:<17}{entry["message"]}'
