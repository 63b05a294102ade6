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
The demo: world, DDS, node and recorder as separate processes, then pictures of what happened.

The parent publishes nothing; it starts the processes in a ROS domain of their own, watches the
planner's topics like any other subscriber, and reads the bag back when the drive is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import json
from pathlib import Path
import sys
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.live.marker_view import draw_markers
from rspec_planner.live.monitor import PlanMonitor
from rspec_planner.live.pictures import contact_sheet, draw_frame, Extras, write_picture
from rspec_planner.live.processes import Child, ChildError, free_domain_id, Processes
from rspec_planner.live.recorded import frames_at, read_drive, RecordedDrive
from rspec_planner.live.session import ros_node, stop_on_signals
from rspec_planner.planner.timing import LatencyWindow
from rspec_planner.world.rig import Rig

START_S = 120.0  # the node imports, loads and warms up a model before it listens
FIRST_PLAN_S = 20.0  # from the first frame
FINISH_S = 15.0
EXAMPLES = 12
SECONDS = (5.0, 3600.0)
WORLD_MODULE, NODE_MODULE = 'rspec_planner.live.world_publisher', 'rspec_planner'


@dataclass(frozen=True)
class DemoCommands:
    """How world and node are started; tests put lighter ones in their place."""

    world: tuple[str, ...] = (sys.executable, '-m', WORLD_MODULE)
    node: tuple[str, ...] = (sys.executable, '-m', NODE_MODULE)


def run_demo(*, seconds: float = 90.0, out: str | Path = 'out/demo', seed: int = 0,
             families: Sequence[str] = (), pictures: int = 12,
             node_arguments: Sequence[str] = (),
             commands: DemoCommands | None = None) -> dict[str, Any]:
    """
    Drive the embedded world through the live node and return the summary of the drive.

    Writes drive.mcap, summary.json, logs and pictures below `out`; earlier ones are replaced.
    Raises ChildError when a process dies or no plan arrives, ConfigurationError for a length or a
    number of pictures out of range.
    """
    if not SECONDS[0] <= seconds <= SECONDS[1]:
        raise ConfigurationError(f'seconds {seconds} is out of range; use {SECONDS[0]:.0f} to '
                                 f'{SECONDS[1]:.0f}')
    if pictures < 0:
        raise ConfigurationError(f'pictures {pictures} is negative; use 0 or above')
    folder = _clear(Path(out))
    began = time.monotonic()
    run = _Run(folder, seconds, commands or DemoCommands())
    run.drive([*_world_arguments(seconds, seed, families)], tuple(node_arguments))
    drive = read_drive(folder / 'drive.mcap')
    tell('drawing pictures')
    drawn = draw_pictures(drive, folder / 'pictures', pictures)
    summary = {**summarise(drive), 'world': run.world_report, 'seconds': seconds, 'seed': seed,
               'wall_s': round(time.monotonic() - began, 1), 'pictures': drawn,
               'summary': str(folder / 'summary.json')}
    (folder / 'summary.json').write_text(json.dumps(summary, indent=2) + '\n', encoding='utf-8')
    return summary


def tell(text: str) -> None:
    """Say on stderr what is going on."""
    print(f'demo: {text}', file=sys.stderr, flush=True)


class _Run:
    """The live part of one demo."""

    def __init__(self, folder: Path, seconds: float, commands: DemoCommands) -> None:
        self._folder, self._seconds, self._commands = folder, seconds, commands
        self.world_report: dict[str, Any] = {}

    def drive(self, world_arguments: Sequence[str], node_arguments: Sequence[str]) -> None:
        """Start everything, wait for the end of the world, and close the bag."""
        domain = free_domain_id()
        tell(f'ROS_DOMAIN_ID={domain}, output in {self._folder}')
        with stop_on_signals() as stopped, \
                Processes(self._folder / 'logs', domain_id=domain) as processes:
            ready = self._folder / 'logs' / 'recorder.ready'
            recorder = processes.start_module(
                'recorder', 'rspec_planner.live.recorder', str(self._folder / 'drive.mcap'),
                '--ready-file', str(ready))
            processes.start('node', [*self._commands.node, *node_arguments])
            processes.wait_for(ready.exists, 'the start of the recorder', START_S)
            world = processes.start('world', [*self._commands.world, *world_arguments],
                                    extra_environment={'OMP_NUM_THREADS': '1'})
            with ros_node('rspec_demo', domain) as (node, executor):
                def spin() -> bool:
                    executor.spin_once(timeout_sec=0.1)
                    return stopped.is_set()

                self._watch(processes, world, PlanMonitor(node), spin)
            self._close(processes, world, recorder)

    def _watch(self, processes: Processes, world: Child, monitor: PlanMonitor,
               spin: Callable[[], bool]) -> None:
        """Follow the drive until the world ends; `spin` tells when to stop early."""
        tell('starting the node; it loads and warms up the model')
        started: float | None = None
        deadline = time.monotonic() + START_S + self._seconds
        with tqdm(total=self._seconds, unit='s', file=sys.stderr, disable=None, leave=False,
                  bar_format='{n:.0f}/{total:.0f} s |{bar:20}| {desc}') as bar:
            while world.running:
                if spin():
                    raise ChildError('the demo was interrupted; nothing was drawn')
                processes.check(ended_well=('world',))
                now = time.monotonic()
                if started is None and monitor.streaming():
                    started = now
                    tell(f'driving for {self._seconds:.0f} s')
                if started is not None:
                    self._show(bar, now - started, monitor)
                    if not monitor.plans and now - started > FIRST_PLAN_S:
                        raise ChildError(_no_plan(monitor, now - started, self._folder))
                if now > deadline:
                    raise ChildError(f'world did not end within {START_S + self._seconds:.0f} s; '
                                     f'see {world.log}')
        if not monitor.plans:
            processes.check(ended_well=('world',))
            raise ChildError(_no_plan(monitor, self._seconds, self._folder))

    def _show(self, bar: Any, elapsed: float, monitor: PlanMonitor) -> None:
        bar.n = min(elapsed, self._seconds)
        text = monitor.newest.reasoning if monitor.newest else 'waiting for the first plan'
        bar.set_description_str(f'{monitor.plans} plans  {text}'[:110])

    def _close(self, processes: Processes, world: Child, recorder: Child) -> None:
        """Let the last plan arrive, close the bag, and read what the world reports."""
        processes.check(ended_well=('world',))
        self.world_report = json.loads(world.log.read_text().splitlines()[-1])
        time.sleep(1.0)  # the plan of the last frame is still on its way
        if processes.stop(recorder, FINISH_S) != 0:
            raise ChildError(f'recorder could not close the bag: {recorder.cause()} '
                             f'(log: {recorder.log})')


def _no_plan(monitor: PlanMonitor, seconds: float, folder: Path) -> str:
    """Return one line on why no plan arrived, as far as the node said so itself."""
    # a failed engine explains everything else, and silent inputs explain least
    complaints = [f'{task}: {monitor.diagnostics[task][1]}'
                  for task in ('engine', 'inference_status', 'latency', 'inputs')
                  if monitor.diagnostics.get(task, (0, '', {}))[0] > 0]
    skips = ', '.join(f'{reason} {count}' for reason, count in monitor.skipped().items())
    return (f'no plan arrived in {seconds:.0f} s of driving; the node says: '
            f'{complaints[0] if complaints else "nothing"} (skipped: {skips or "none"}; '
            f'log: {folder / "logs" / "node.log"})')


def _clear(folder: Path) -> Path:
    """Make the output folder and remove what an earlier demo left in it."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f'{folder} is a file; choose another --out folder')
    for pattern in ('drive.mcap', 'summary.json', 'pictures/*.png', 'logs/*'):
        for path in folder.glob(pattern):
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _world_arguments(seconds: float, seed: int, families: Sequence[str]) -> list[str]:
    """Return the world's options; it starts when node and recorder both listen."""
    scenario = ['--scenario', ','.join(families)] if families else []
    return ['--seconds', str(seconds), '--seed', str(seed), '--subscribers', '2', *scenario]


def summarise(drive: RecordedDrive) -> dict[str, Any]:
    """Return the figures of a recorded drive."""
    stamps = drive.stamps
    window = LatencyWindow(1_000_000)
    for value in drive.samples('processing_time_ms'):
        window.add(value)
    arrivals = [drive.arrivals[t0] for t0 in stamps]
    span_s = (arrivals[-1] - arrivals[0]) / 1e9
    inputs, inference = (drive.status_values(t) for t in ('inputs', 'inference_status'))
    lengths = drive.samples('speculation/mean_accepted_length')
    judged = [t0 for t0 in stamps if drive.truth.get(t0, {}).get('text')]
    agreed = sum(drive.texts[t0] == drive.truth[t0]['text'] for t0 in judged)
    return {
        'plans': len(stamps), 'rejected': int(inference.get('rejected_total', 0)),
        'superseded': int(inference.get('superseded_total', 0)),
        'rate_hz': round((len(stamps) - 1) / span_s, 2) if span_s > 0 else 0.0,
        'frame_ms': window.summary(),
        'accepted_length': round(float(np.mean(lengths)), 3) if lengths else 0.0,
        'reasoning_examples': list(dict.fromkeys(drive.texts[t0] for t0 in stamps))[:EXAMPLES],
        'same_words_as_expert': {'plans': agreed, 'of': len(judged)},
        'skipped': {key.removeprefix('skipped_'): int(value) for key, value in inputs.items()
                    if key.startswith('skipped_') and key != 'skipped_total'},
        'bag': str(drive.bag)}


def choose_plans(drive: RecordedDrive, count: int) -> list[int]:
    """
    Return at most `count` t0, in order, that show the drive's variety.

    Each different reasoning is shown by the middle of its longest run; what is left is spread
    over the drive.
    """
    stamps = drive.stamps
    best: dict[str, list[int]] = {}
    run: list[int] = []
    for t0 in stamps:
        run = [*run, t0] if run and drive.texts[run[-1]] == drive.texts[t0] else [t0]
        if len(run) > len(best.get(drive.texts[t0], [])):
            best[drive.texts[t0]] = run
    middles = sorted(run[len(run) // 2] for run in best.values())
    if len(middles) > count:
        middles = [middles[i] for i in np.linspace(0, len(middles) - 1, count).round().astype(int)]
    spread = [stamps[i] for i in np.linspace(0, len(stamps) - 1, count).round().astype(int)]
    chosen = list(dict.fromkeys(middles + spread))[:max(count, 0)]
    return sorted(chosen)


def draw_pictures(drive: RecordedDrive, folder: Path, count: int) -> list[str]:
    """Draw chosen plans, the markers that RViz got of them, and a contact sheet; return paths."""
    rig, stamps = Rig(), drive.stamps
    pictures, paths = [], []
    chosen = choose_plans(drive, count)
    bar = tqdm(frames_at(drive.bag, rig.names, chosen), total=len(chosen), unit='picture',
               file=sys.stderr, disable=None, leave=False)
    for t0, images in bar:
        truth, plan = drive.truth.get(t0, {}), drive.plan(t0)
        family = truth.get('family', '').replace('_', ' ')
        picture = draw_frame(images, plan, rig, Extras(
            elapsed_s=(t0 - stamps[0]) / 1e9, plan_number=stamps.index(t0) + 1,
            notes=(f'scenario: {family}',) if family else ()))
        pictures.append(picture)
        paths.append(_write(folder / f'plan_{stamps.index(t0) + 1:04d}.png', picture))
        if t0 in drive.markers:
            paths.append(_write(folder / f'markers_{stamps.index(t0) + 1:04d}.png',
                                draw_markers(drive.markers[t0], plan.ego_pose_at_t0)))
    if pictures:
        paths.append(_write(folder / 'contact_sheet.png', contact_sheet(pictures)))
    return paths


def _write(path: Path, picture: np.ndarray) -> str:
    write_picture(path, picture)
    return str(path)
