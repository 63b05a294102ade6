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
"""`rspec engine`: export the stages, build engines from them and check both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack
from pathlib import Path
from typing import Any

import click

from rspec_planner.cli_report import CONTEXT, reports, share

CHECKPOINT = click.option('--profile', 'checkpoint', default='tiny', show_default=True,
                          metavar='NAME|FOLDER', help="'tiny', a checkpoint folder, or "
                          "'alpamayo-r1' or 'alpamayo-1.5' for shapes without "
                          "weights; 'alpamayo-r1-slice2' has two layers of each stack.")
DRAFT = click.option('--draft', default='default', show_default=True,
                     help="An embedded name, a folder, or 'none'.")
FLAVOUR = click.option('--flavour', default='tensorrt_rtx', show_default=True,
                       help="'tensorrt_rtx' for RTX GPUs, 'tensorrt' for all others.")
PRECISION = click.option('--precision', default='fp16', show_default=True,
                         type=click.Choice(('fp32', 'fp16', 'bf16', 'fp8', 'int8')),
                         help='fp8 and int8: weights of the decoder layers, bf16 between them.')


@click.group(context_settings=CONTEXT)
def engine() -> None:
    """Export the stages to ONNX, build TensorRT engines from them, check both."""


def _exported(report: Any) -> Iterator[str]:
    """Yield one line per stage, then the folder."""
    for stage in report['engines']:
        yield (f'{stage["stage"]:10} {stage["bytes"] / 2**20:7.2f} MiB  {stage["inputs"]} inputs, '
               f'{stage["weights"]} of them weights, {stage["nodes"]} nodes')
    yield f'{report["profile"]} {report["precision"]} -> {report["folder"]}'


@engine.command('export')
@CHECKPOINT
@DRAFT
@PRECISION
@click.option('--samples', type=click.IntRange(1, 32), default=1, show_default=True,
              help='Trajectories per flow step.')
@click.option('--stage', 'stages', multiple=True, help='Only this stage. Repeatable.')
@click.option('--out', type=click.Path(path_type=Path),
              help='Folder for the graphs. Default: engines/<profile>-<precision>/onnx.')
@reports(_exported)
def export(checkpoint: str, draft: str, precision: str, samples: int, stages: Sequence[str],
           out: Path | None) -> Mapping[str, Any]:
    """Write vision, prefill, draft, verify and flow_step as ONNX graphs without weights."""
    from rspec_planner.engine.export import export_stages
    from rspec_planner.engine.stages import STAGE_NAMES
    from rspec_planner.planner.staging import read_source
    source = read_source(checkpoint, precision, draft, samples)
    folder = out or default_folder(source.target.cfg.name, precision)
    with share('exporting') as show:
        made = export_stages(source.target, source.draft, source.shapes, precision,
                             source.checkpoints, folder, names=stages or STAGE_NAMES,
                             progress=show)
    return {'profile': made.profile, 'precision': precision, 'folder': folder,
            'engines': [{'stage': stage.name, 'precision': precision, 'flavour': 'onnx', 'sm': [],
                         'file': stage.file, 'bytes': stage.bytes, 'sha256': stage.sha256,
                         'checked': False, 'inputs': len(stage.inputs),
                         'weights': len(stage.weights), 'nodes': sum(stage.operators.values())}
                        for stage in made.stages]}


def _checked(report: Any) -> Iterator[str]:
    """Yield one line per stage and one for the loop."""
    for one in report['engines']:
        yield (f'{"ok  " if one["checked"] else "FAIL"} {one["stage"]:10} {one["precision"]}  '
               f'error {one["error"]:.1e} in {one["worst_output"]}, tolerance '
               f'{one["tolerance"]:.0e}')
    loop = report['loop']
    if loop is not None:
        yield (f'{"ok  " if loop["ok"] else "FAIL"} loop       {loop["clips"]} clips, '
               f'{loop["token_mismatches"]} texts and {loop["trajectory_mismatches"]} paths '
               f'differ, paths by {1e3 * loop["largest_deviation_m"]:.3g} mm at most')


@engine.command('check')
@CHECKPOINT
@DRAFT
@PRECISION
@click.option('--clips', type=click.IntRange(0), default=50, show_default=True,
              help='Clips that the loop plans over the graphs and over PyTorch.')
@click.option('--frames', type=click.IntRange(0), default=2, show_default=True,
              help='World frames per stage.')
@click.option('--random', 'random_frames', type=click.IntRange(0), default=3, show_default=True,
              help='Frames of random inputs per stage.')
@click.option('--folder', type=click.Path(path_type=Path),
              help='Exported graphs. Default: engines/<profile>-<precision>/onnx; exported first '
              'when there are none.')
@reports(_checked)
def check(checkpoint: str, draft: str, precision: str, clips: int, frames: int,
          random_frames: int, folder: Path | None) -> Mapping[str, Any]:
    """Run the graphs on ONNX Runtime beside PyTorch: every stage, then the whole loop."""
    from rspec_planner.engine.stages import read_stages
    from rspec_planner.evaluate.engine_check import Amount, check_folder
    from rspec_planner.planner.drafts import checkpoint_folder
    from rspec_planner.planner.staging import check_drawable, known_profile, read_source
    check_drawable(checkpoint, precision, draft)  # before minutes of exporting
    graphs = folder or default_folder(Path(checkpoint).name, precision)
    if folder is None:
        _export_if_stale(graphs, checkpoint, draft, precision, ())
    stages = read_stages(graphs)
    source = read_source(checkpoint, stages.precision, draft, stages.shapes.samples, weights=True)
    weights = None if known_profile(checkpoint) else checkpoint_folder(checkpoint)
    bars = _Bars()
    with bars:
        return check_folder(graphs, source, weights, Amount(random_frames, frames, clips),
                            bars.show)


class _Bars(ExitStack):
    """One progress bar per part of a long check."""

    def __init__(self) -> None:
        super().__init__()
        self._bars: dict[str, Callable[[int, int], None]] = {}

    def show(self, label: str, done: int, total: int) -> None:
        """Move the bar of a part, made at its first call."""
        if label not in self._bars:
            self._bars[label] = self.enter_context(share(label))
        self._bars[label](done, total)


def _engines(report: Any) -> Iterator[str]:
    """Yield one line per engine."""
    for one in report['engines']:
        note = one.get('fault') or ('up to date' if one.get('reused') else
                                    f'{one["seconds"]:.1f} s, {one["peak_mib"]} MiB of memory')
        yield (f'{one["folder"]} {one["stage"]:10} {one["precision"]} {one["flavour"]} '
               f'{one["version"]} sm {",".join(one["sm"])} {one["bytes"] / 2**20:8.2f} MiB '
               f' {note}')
    if not report['engines']:
        yield 'no engines: rspec engine build makes them'


@engine.command('build')
@CHECKPOINT
@DRAFT
@click.option('--precision', default='fp16', show_default=True,
              type=click.Choice(('fp16', 'bf16', 'fp8', 'int8')),
              help='fp8 and int8: weights of the decoder layers, bf16 between them.')
@FLAVOUR
@click.option('--sm', 'sms', default='', metavar='86,89,...',
              help='Compute capabilities to build for. Needed by tensorrt_rtx; tensorrt builds '
              'for the GPU at hand.')
@click.option('--stage', 'stages', multiple=True, help='Only this stage. Repeatable.')
@click.option('--rebuild', is_flag=True, help='Also what is up to date.')
@click.option('--out', type=click.Path(path_type=Path),
              help='Folder of the set. Default: engines/<profile>-<precision>.')
@reports(_engines)
def build(checkpoint: str, draft: str, precision: str, flavour: str, sms: str,
          stages: Sequence[str], rebuild: bool, out: Path | None) -> Mapping[str, Any]:
    """Build TensorRT engines, each with a manifest; graphs that are missing are exported first."""
    from rspec_planner.engine.engine_manifest import ONNX_FOLDER
    from rspec_planner.engine.tensorrt_library import check_targets, load_library, present_sm
    from rspec_planner.engine.tensorrt_set import build_set
    library = load_library(flavour)
    targets = check_targets(library.flavour, sms.split(','), precision, present_sm())
    folder = out or default_folder(Path(checkpoint).name, precision).parent
    _export_if_stale(folder / ONNX_FOLDER, checkpoint, draft, precision, stages)
    made = build_set(library, folder, targets, stages, rebuild, _build_bar)
    return {'folder': folder, 'engines': [{'folder': folder, **one} for one in made]}


def _export_if_stale(folder: Path, checkpoint: str, draft: str, precision: str,
                     wanted: Sequence[str]) -> None:
    """Export all stages unless the folder has those wanted, as it would be written now."""
    from rspec_planner.engine.export import export_stages, toolchain
    from rspec_planner.engine.stages import read_stages, STAGE_NAMES, STAGES_NAME
    from rspec_planner.planner.staging import read_source, source_digests
    digests = source_digests(checkpoint, draft)
    if (folder / STAGES_NAME).is_file():
        found = read_stages(folder)
        needed = set(wanted or STAGE_NAMES) - (set() if 'draft' in digests else {'draft'})
        complete = {stage.name for stage in found.stages} >= needed
        same = (found.precision, found.checkpoints, found.toolchain) == (
            precision, digests, toolchain())
        if complete and same:
            return
    source = read_source(checkpoint, precision, draft)
    with share('exporting') as show:
        export_stages(source.target, source.draft, source.shapes, precision, source.checkpoints,
                      folder, progress=show)


@contextmanager
def _build_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    with share(label) as show:
        yield show


@engine.command('list')
@click.argument('folders', nargs=-1, type=click.Path(path_type=Path))
@reports(_engines)
def list_engines(folders: Sequence[Path]) -> Mapping[str, Any]:
    """
    Tell which engines lie in FOLDERS (default: all of engines/) and whether they are intact.

    Ends with exit code 1 when one is not.
    """
    from rspec_planner.engine.tensorrt_set import examine_set
    chosen = folders or sorted({path.parent for pattern in ('*/onnx', '*/*.*.json')
                                for path in Path('engines').glob(pattern)})
    found = [{'folder': folder, **one} for folder in chosen for one in examine_set(folder)]
    return {'engines': found, 'ok': not any(one['fault'] for one in found)}


@engine.command('inspect')
@click.argument('folder', type=click.Path(path_type=Path))
@click.argument('stage')
@FLAVOUR
@reports()
def inspect_engine(folder: Path, stage: str, flavour: str) -> Mapping[str, Any]:
    """Print the manifest of one engine: what it is, what it was built from, what it binds."""
    from rspec_planner.engine.engine_manifest import describe, read_engine, read_manifest
    manifest = read_manifest(folder, stage, flavour)
    read_engine(folder, manifest)
    return {**manifest.to_dict(), 'inputs': [describe(port) for port in manifest.inputs],
            'outputs': [describe(port) for port in manifest.outputs], 'intact': True}


def _tested(report: Any) -> Iterator[str]:
    """Yield one line per stage, one for the loop and one for the whole."""
    for one in report['engines']:
        held = [word for word in ('checked', 'captured', 'replayed') if not one[word]]
        yield (f'{"FAIL" if held else "ok  "} {one["stage"]:10} error {one["error"]:.1e} of '
               f'{one["tolerance"]:.0e}, {one["ms_p50"]:.3f} ms p50, {one["ms_p99"]:.3f} ms p99'
               + (f'  not {", ".join(held)}' if held else ''))
    loop = report['loop']
    if loop is not None:
        yield (f'{"ok  " if loop["ok"] else "FAIL"} loop       {loop["clips"]} clips, '
               f'{loop["token_mismatches"]} texts and {loop["trajectory_mismatches"]} paths '
               'differ')
    for name in ('first_start', 'second_start'):
        yield (f'{name.replace("_", " "):15} {report[name]["seconds"]:.1f} s, kernels '
               f'{report[name]["kernels"]}')
    failed = [name for name, held in report['checks'].items() if not held]
    yield (f'{report["backend"]} {report["tensorrt_version"]} on {report["gpu"]}: '
           + (f'FAIL {", ".join(failed)}' if failed else 'ok'))


@engine.command('selftest')
@click.argument('folder', type=click.Path(path_type=Path))
@CHECKPOINT
@DRAFT
@FLAVOUR
@click.option('--device', default='cuda', show_default=True)
@click.option('--clips', type=click.IntRange(0), default=10, show_default=True,
              help='Clips that the loop plans over the engines and over PyTorch.')
@click.option('--replays', type=click.IntRange(1), default=1000, show_default=True,
              help='Replays of every captured stage.')
@reports(_tested)
def selftest_engines(folder: Path, checkpoint: str, draft: str, flavour: str, device: str,
                     clips: int, replays: int) -> Mapping[str, Any]:
    """Run the engines of FOLDER on this GPU: parity, capture, replays, loop, times, restart."""
    from rspec_planner.engine.engine_manifest import ONNX_FOLDER
    from rspec_planner.engine.stages import read_stages
    from rspec_planner.engine.tensorrt_library import load_library
    from rspec_planner.engine.tensorrt_runtime import find_gpu
    from rspec_planner.evaluate.engine_check import Amount
    from rspec_planner.evaluate.engine_selftest import cuda_device, moved, selftest
    from rspec_planner.planner.drafts import checkpoint_folder
    from rspec_planner.planner.staging import read_source
    library, gpu = load_library(flavour), find_gpu(device)
    stages = read_stages(folder / ONNX_FOLDER)
    source = moved(read_source(checkpoint, stages.precision, draft, stages.shapes.samples,
                               weights=True), gpu)
    bars = _Bars()
    with bars:
        return selftest(library, gpu, folder, source, checkpoint_folder(checkpoint),
                        Amount(clips=clips), cuda_device(gpu), replays, bars.show)


def default_folder(profile: str, precision: str) -> Path:
    """Return where the graphs of a profile land unless told otherwise."""
    return Path('engines') / f'{profile}-{precision}' / 'onnx'
