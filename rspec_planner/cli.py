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
The `rspec` command: arguments in, one report out; the work is done elsewhere.

Each subcommand returns a mapping. With --json it is the last line of stdout, one object; without,
it is printed for people. Imports of numpy, PyTorch and ROS happen inside the subcommands, so
that help is quick and a missing package stops only what needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import functools
import os
from pathlib import Path
import sys
from typing import Any

import click

from rspec_planner import __version__
from rspec_planner.cli_checkpoint import bench_checkpoint
from rspec_planner.cli_engine import engine
from rspec_planner.cli_evaluate import evaluate
from rspec_planner.cli_profiles import profiles
from rspec_planner.cli_report import CONTEXT, progress, reports, share
from rspec_planner.cli_research import bench, train
from rspec_planner.cli_trust import add_to
from rspec_planner.errors import ConfigurationError, RspecError

TRACEBACK_VARIABLE = 'RSPEC_TRACEBACK'

#: top-level module -> how to get it
_REMEDIES = {
    'rclpy': 'pip install -r requirements-ros.txt, or source a ROS 2 installation',
    'torch': 'pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu',
    'matplotlib': 'pip install -r requirements.txt',
    'onnx': 'pip install -r requirements-engine.txt',
    'onnxruntime': 'pip install -r requirements-engine.txt',
    'onnxscript': 'pip install -r requirements-engine.txt',
}


def _examination(report: Any) -> Iterator[str]:
    """Yield the findings of the doctor, one line each, and what to do below them."""
    for check in report['checks']:
        yield f'{"ok  " if check["ok"] else "FAIL"} {check["name"]}: {check["detail"]}'
        if check['fix']:
            yield f'     -> {check["fix"]}'


def split_list(values: Sequence[str]) -> list[str]:
    """Return the entries of a repeatable option whose values may hold commas."""
    return [part.strip() for value in values for part in value.split(',') if part.strip()]


def parse_phases(values: Sequence[str]) -> dict[str, float]:
    """Return {'front_tele': 5.0} for ['front_tele=5']."""
    phases = {}
    for entry in split_list(values):
        camera, _, number = entry.partition('=')
        try:
            phases[camera] = float(number)
        except ValueError:
            raise ConfigurationError(f"--phase-ms '{entry}' is not CAMERA=MILLISECONDS; "
                                     "write for example front_tele=5") from None
    return phases


@click.group(context_settings=CONTEXT)
def cli() -> None:
    """Plan a drive with reasoning: cameras and odometry in, reasons and trajectory out."""


@cli.command()
@reports()
def version() -> Mapping[str, Any]:
    """Print the version of this package and of what it runs on."""
    from importlib import metadata
    import platform
    versions = {'version': __version__, 'python': platform.python_version()}
    for name in ('torch', 'numpy', 'opencv-python-headless', 'ros-rclpy', 'rosbags'):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = 'not installed'
    return versions


@cli.command()
@click.option('--checkpoint', default='', help='Examine this folder instead of the machine.')
@click.option('--device', default='', help='Where it shall run. Default: a GPU if there is one.')
@click.option('--hashes', is_flag=True, help='Also compare the shards with the sums of the '
              'download; this reads all of them.')
@click.option('--free-shared-memory', is_flag=True, help='First remove the segments that killed '
              'Fast DDS processes left in /dev/shm.')
@reports(_examination)
def doctor(checkpoint: str, device: str, hashes: bool,
           free_shared_memory: bool) -> Mapping[str, Any]:
    """
    Check what is installed, name what is missing and say what to do.

    With --checkpoint: will this folder run here, from names and headers alone.
    """
    if free_shared_memory:
        from rspec_planner.shared_memory import dead_segments, free_segments
        dead = dead_segments()
        freed = free_segments(dead)
        click.echo(f'{freed // 1024**2} MiB of {len(dead)} dead segments removed', err=True)
    if checkpoint:
        from rspec_planner.doctor_checkpoint import examine_checkpoint
        return examine_checkpoint(checkpoint, device, hashes)
    from rspec_planner.doctor import examine
    return examine()


@cli.command()
@click.option('--seconds', type=float, default=0.0, help='End after this time. Default: Ctrl-C.')
@click.option('--once', is_flag=True, help='End after the first plan.')
@click.option('--echo', is_flag=True, help='One line per plan instead of a view.')
@click.option('--namespace', default='/planning/rspec_planner', show_default=True,
              help='Namespace and name of the planner node.')
@reports()
def monitor(seconds: float, once: bool, echo: bool, namespace: str,
            as_json: bool) -> Mapping[str, Any]:
    """Show reasoning, trajectory and timing of a running node in the terminal."""
    from rspec_planner.live.monitor import run_monitor
    return run_monitor(seconds=seconds, once=once, echo=echo, namespace=namespace,
                       stream=sys.stderr if as_json else sys.stdout)


@cli.command()
@click.option('--seconds', type=float, default=90.0, show_default=True)
@click.option('--out', type=click.Path(path_type=Path), default=Path('out/demo'),
              show_default=True, help='Folder for bag, summary and pictures; replaced.')
@click.option('--scenario', multiple=True, metavar='FAMILY',
              default=('crosswalk', 'parked', 'red_light', 'cut_in'), show_default=True,
              help='Scenario family; repeat or separate by commas.')
@click.option('--seed', type=int, default=5, show_default=True)
@click.option('--pictures', type=int, default=12, show_default=True)
@reports()
def demo(seconds: float, out: Path, scenario: Sequence[str], seed: int,
         pictures: int) -> Mapping[str, Any]:
    """Drive the embedded world through the live node on real ROS topics."""
    from rspec_planner.live.demo import run_demo
    return run_demo(seconds=seconds, out=out, seed=seed, families=split_list(scenario),
                    pictures=pictures)


@cli.command('record-world')
@click.argument('out', type=click.Path(path_type=Path))
@click.option('--scenario', multiple=True, metavar='FAMILY',
              help='Scenario family; repeat or separate by commas. Default: all.')
@click.option('--seconds', type=float, default=20.0, show_default=True)
@click.option('--seed', type=int, default=0, show_default=True)
@click.option('--encoding', default='jpeg', show_default=True, help='jpeg, png or raw.')
@click.option('--storage', default='', help='mcap or sqlite3. Default: by suffix.')
@click.option('--odometry-hz', type=float, default=100.0, show_default=True)
@click.option('--phase-ms', multiple=True, metavar='CAMERA=MS',
              help='Constant lateness of one camera.')
@click.option('--jitter-ms', type=float, default=0.0, help='Deviation of image stamps.')
@click.option('--drop', type=float, default=0.0, help='Share of camera frames that are lost.')
@click.option('--clock', is_flag=True, help='Record /clock as well.')
@click.option('--overwrite', is_flag=True, help='Replace an existing bag.')
@reports()
def record_world(out: Path, scenario: Sequence[str], seconds: float, seed: int, encoding: str,
                 storage: str, odometry_hz: float, phase_ms: Sequence[str], jitter_ms: float,
                 drop: float, clock: bool, overwrite: bool) -> Mapping[str, Any]:
    """
    Drive through the embedded world and write OUT, a rosbag2 bag.

    OUT ending in .mcap or .db3 is one file, anything else a folder with metadata.yaml.
    """
    from rspec_planner.world.drive import Drive
    from rspec_planner.world.record import frame_count, RecordOptions
    from rspec_planner.world.record import record_world as record
    from rspec_planner.world.rig import Rig
    options = RecordOptions(encoding=encoding, odometry_hz=odometry_hz, seed=seed,
                            phase_ms=parse_phases(phase_ms), jitter_ms=jitter_ms, drop=drop,
                            clock=clock)
    rig = Rig()
    unknown = sorted(set(options.phase_ms) - set(rig.names))
    if unknown:
        raise ConfigurationError(f"--phase-ms names camera '{unknown[0]}'; use one of "
                                 f'{", ".join(rig.names)}')
    drive = Drive(split_list(scenario), seed, rig=rig)
    with progress(frame_count(seconds), 'recording') as advance:
        result = record(out, drive, seconds, options, rig=rig, storage=storage,
                        overwrite=overwrite, progress=advance)
    return {'bag': result.bag, 'messages': result.messages, 'scenarios': result.scenarios,
            'seconds': seconds, 'seed': seed}


@cli.command()
@click.argument('bags', nargs=-1, required=True, metavar='BAG...',
                type=click.Path(path_type=Path, readable=False))  # one of many is named later
@click.option('--out', type=click.Path(path_type=Path), help='Also write the plans as a bag.')
@click.option('--records', type=click.Path(path_type=Path),
              help='JSONL with one plan per line. Default: beside the bag.')
@click.option('--topics', type=click.Path(path_type=Path),
              help='YAML that maps topics of the bag to cameras and odometry.')
@click.option('--params', type=click.Path(path_type=Path),
              help="The node's parameter file. Default: the shipped one.")
@click.option('--checkpoint', default='', help='Overrides model.checkpoint of --params.')
@click.option('--device', default='', help='Overrides model.device of --params.')
@click.option('--seed', type=int, help='Overrides model.seed of --params.')
@click.option('--draft', default='', help='Overrides speculation.draft of --params: an embedded '
              "name, a folder, or 'none' for one token per target forward.")
@click.option('--overwrite', is_flag=True, help='Replace an existing --out bag.')
@click.option('--workers', type=click.IntRange(0), default=0, show_default=True,
              help='Processors for many bags, through Ray; 0 plans one after the other here.')
@click.option('--folder', type=click.Path(path_type=Path),
              help='Many bags: receives records and reports; what is there is not done again.')
@reports()
def plan(bags: Sequence[Path], workers: int, folder: Path | None, **given: Any
         ) -> Mapping[str, Any]:
    """Plan each BAG offline, without DDS; the same bag and seed give the same records."""
    from rspec_planner.offline import OfflineOptions, plan_bag
    options = OfflineOptions(**given)
    if len(bags) > 1 or workers or folder is not None:
        from rspec_planner.fleet import plan_fleet
        with share('bags') as show:
            return plan_fleet(bags, options, folder or Path('plans'), workers=workers,
                              progress=show)
    return plan_bag(bags[0], options, progress=functools.partial(progress, label='planning'))


@cli.command()
@click.argument('out', type=click.Path(path_type=Path))
@click.option('--seconds', type=float, default=0.0, help='End after this time. Default: Ctrl-C.')
@click.option('--no-inputs', is_flag=True, help='Leave cameras and odometry out.')
@reports()
def record(out: Path, seconds: float, no_inputs: bool) -> Mapping[str, Any]:
    """Record plans, diagnostics and inputs of a running node into OUT, an mcap bag."""
    from rspec_planner.live.recorder import run_recorder
    return run_recorder(out, inputs=not no_inputs, seconds=seconds)


@cli.command()
@click.argument('bag', type=click.Path(path_type=Path))
@click.option('--rate', type=float, default=1.0, show_default=True)
@click.option('--loop', is_flag=True, help='Start again at the end, until Ctrl-C.')
@click.option('--topics', type=click.Path(path_type=Path),
              help='YAML that maps topics of the bag to cameras and odometry.')
@click.option('--inputs-only', is_flag=True, help='Leave out what a planner published.')
@reports()
def replay(bag: Path, rate: float, loop: bool, topics: Path | None,
           inputs_only: bool) -> Mapping[str, Any]:
    """Publish BAG on ROS topics, with /clock."""
    from rspec_planner.live.replay import run_replay
    return run_replay(bag, rate, loop, topics=topics, inputs_only=inputs_only)


@bench.command('node')
@click.option('--seconds', type=float, default=10.0, show_default=True, help='Of each case.')
@click.option('--size', default='1920x1080', show_default=True, help='Pixels of a camera.')
@click.option('--only', default='', help="Cases whose name holds this, for example 'shipped'.")
@reports()
def bench_node(seconds: float, size: str, only: str) -> Mapping[str, Any]:
    """Time all of the node but the planner, over DDS, with both Fast DDS profiles."""
    from rspec_planner.live.bench_node import bench_node as measure
    from rspec_planner.live.bench_node import CASES
    width, _, height = size.partition('x')
    cases = [case for case in CASES if only in case.name]
    if not (width.isdigit() and height.isdigit()) or not cases:
        raise ConfigurationError(
            f"--size '{size}' --only '{only}' name no case; give WIDTHxHEIGHT and a part of: "
            + '; '.join(case.name for case in CASES))
    return measure(seconds=seconds, width=int(width), height=int(height), cases=cases)


add_to(bench)
bench.add_command(bench_checkpoint)
for group in (train, evaluate, bench, engine, profiles):
    cli.add_command(group)


def _describe(error: BaseException) -> tuple[str, int]:
    """Return the one line and the exit code for what a subcommand raised."""
    if isinstance(error, click.ClickException):
        context = getattr(error, 'ctx', None)
        hint = f'; see: {context.command_path} --help' if context else ''
        return error.format_message().rstrip('.') + hint, 2
    if isinstance(error, RspecError):
        return str(error), 2
    if isinstance(error, ModuleNotFoundError) and 'rspec_planner' not in str(error.name):
        remedy = _REMEDIES.get(str(error.name).split('.')[0], 'run: rspec doctor')
        return f"Python module '{error.name}' is missing; {remedy}", 2
    if isinstance(error, OSError) and error.filename is not None:
        return f'{error.filename}: {error.strerror}; check the path and its permissions', 2
    return (f'unexpected {type(error).__name__}: {error}; set {TRACEBACK_VARIABLE}=1 for the '
            'traceback and report it'), 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. A failure is one line on stderr."""
    try:
        code = cli.main(args=arguments, prog_name='rspec', standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        click.echo('error: interrupted', err=True)
        return 130
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as request:
        click.echo(request.format_message(), err=True)
        return 2
    except Exception as error:  # the one place where anything may arrive
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        line, code = _describe(error)
        click.echo('error: ' + ' '.join(line.split()), err=True)
        return code


if __name__ == '__main__':
    sys.exit(main())
