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
"""The training and latency subcommands of `rspec`: train and bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import click

from rspec_planner.cli_report import CONTEXT, reports
from rspec_planner.errors import ConfigurationError


class SettingsCommand(click.Command):
    """Adds one option for each training setting, read when the command is really used."""

    #: module of rspec_planner.train and dataclass, and settings that the command decides itself
    settings: ClassVar[tuple[str, str]]
    fixed: ClassVar[frozenset[str]] = frozenset()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the declared options and those of the settings."""
        from dataclasses import fields
        from importlib import import_module
        module, name = self.settings
        kind = getattr(import_module(f'rspec_planner.train.{module}'), name)
        names = {parameter.name for parameter in self.params} | self.fixed
        extra: list[click.Parameter] = []
        for field in fields(kind):
            flag = f'--{field.name.replace("_", "-")}'
            if field.name in names:
                continue
            if isinstance(field.default, bool):
                flag = f'{flag}/--no-{flag[2:]}'
                extra.append(click.Option([flag], default=None, help=f'[{field.default}]'))
            else:
                extra.append(click.Option([flag], type=type(field.default), default=None,
                                          help=f'[{field.default}]'))
        own = super().get_params(ctx)
        return [*own[:-1], *extra, own[-1]]  # --help stays last


class TargetCommand(SettingsCommand):
    """Options of TargetSettings."""

    settings = ('settings', 'TargetSettings')


class DraftCommand(SettingsCommand):
    """Options of DraftSettings; the command's name is the kind."""

    settings = ('draft_settings', 'DraftSettings')
    fixed = frozenset({'kind'})


class AarlCommand(SettingsCommand):
    """Options of AarlSettings."""

    settings = ('aarl_settings', 'AarlSettings')


@click.group(context_settings=CONTEXT)
def train() -> None:
    """Train networks; one process per GPU under torchrun."""


@train.command('target', cls=TargetCommand)
@click.option('--config', type=click.Path(path_type=Path), help='YAML of training settings.')
@click.option('--out', type=click.Path(path_type=Path), default=Path('runs/target'),
              show_default=True, help='Receives checkpoint/ and logs.')
@click.option('--state-dir', type=click.Path(path_type=Path), help='Default: --out.')
@click.option('--init-from', type=click.Path(path_type=Path), help='Start from these weights.')
@click.option('--resume', is_flag=True, help='Continue the saved state.')
@click.option('--smoke', is_flag=True, help='20 steps of a toy size.')
@click.option('--revision', default='', help='Git revision for the manifest.')
@reports()
def train_target(config: Path | None, out: Path, **options: Any) -> Mapping[str, Any]:
    """Train the target on the embedded world; options override --config."""
    from rspec_planner.train.target import train_target as train_it
    return train_it(config, out, **options)


def draft_options(out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a draft's training the options that all of them have."""
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((
                click.option('--config', type=click.Path(path_type=Path),
                             help='YAML of training settings.'),
                click.option('--out', type=click.Path(path_type=Path), default=Path(out),
                             show_default=True, help='Receives checkpoint/ and logs.'),
                click.option('--target', default='tiny', show_default=True,
                             help='The frozen target: an embedded name or a folder.'),
                click.option('--profile', default='', help='Instead of --target: random weights '
                             'of these shapes, such as alpamayo-r1.'),
                click.option('--cache', type=click.Path(path_type=Path),
                             help='Read what the target said from here instead of rendering.'),
                click.option('--save-cache', type=click.Path(path_type=Path),
                             help='Keep what the target said for later runs.'),
                click.option('--resume', is_flag=True, help='Continue the saved state.'),
                click.option('--smoke', is_flag=True, help='A handful of clips and steps.'),
                click.option('--revision', default='', help='Git revision for the manifest.'))):
            function = option(function)
        return function
    return decorate


@train.command('dflash', cls=DraftCommand)
@click.option('--init-from', default='', help='Folder of a draft to go on from.')
@draft_options('runs/dflash')
@reports()
def train_dflash(config: Path | None, out: Path, **options: Any) -> Mapping[str, Any]:
    """Train a DFlash draft of a frozen target; options override --config."""
    from rspec_planner.train.draft import train_draft
    return train_draft('dflash', config, out, **options)


@train.command('eagle3', cls=DraftCommand)
@click.option('--init-from', default='', help='Folder of a draft to go on from.')
@draft_options('runs/eagle3')
@reports()
def train_eagle3(config: Path | None, out: Path, **options: Any) -> Mapping[str, Any]:
    """Train an EAGLE-3 draft of a frozen target; options override --config."""
    from rspec_planner.train.draft import train_draft
    return train_draft('eagle3', config, out, **options)


@train.command('aarl', cls=AarlCommand)
@click.option('--init-from', type=click.Path(path_type=Path), required=True,
              help='Folder of the draft to post-train.')
@draft_options('runs/aarl')
@reports()
def train_aarl(config: Path | None, out: Path, **options: Any) -> Mapping[str, Any]:
    """Post-train a draft by the plans that its proposals lead to; options override --config."""
    from rspec_planner.train.aarl_loop import train_aarl as train_it
    return train_it(config, out, **options)


@train.command('cache-target')
@click.option('--out', type=click.Path(path_type=Path), default=Path('runs/target-cache'),
              show_default=True, help='Receives the parts; a repeated run continues.')
@click.option('--target', default='', help='An embedded name or a folder.')
@click.option('--profile', default='', help='Instead of --target: random weights of these '
              'shapes, such as alpamayo-r1.')
@click.option('--bag', type=click.Path(path_type=Path), multiple=True,
              help='Every trigger of this bag; may be repeated.')
@click.option('--topics', type=click.Path(path_type=Path), help='Topic names, as in rspec plan.')
@click.option('--physical-ai', type=click.Path(path_type=Path),
              help='A downloaded PhysicalAI-Autonomous-Vehicles folder.')
@click.option('--random-clips', 'random_clip_count', type=int, default=0,
              help='Noise instead of recordings, for memory and speed.')
@click.option('--layers', default='', help="Target layers such as '1,17,33' whose states are "
              "kept, or 'all'; default: those that drafts tap, and the last.")
@click.option('--tail', type=int, default=16, show_default=True,
              help='Prompt rows whose states are kept; a draft window fits in.')
@click.option('--max-tokens', type=int, default=40, show_default=True)
@click.option('--full', is_flag=True, help='Keep the states of the whole prompt.')
@click.option('--prefix', is_flag=True, help='Keep keys and values of prompts, for aarl.')
@click.option('--actions', is_flag=True, help='Keep the plan of the greedy text.')
@click.option('--batch', type=int, default=4, show_default=True, help='Clips at once.')
@click.option('--part-clips', type=int, default=64, show_default=True, help='Clips per part.')
@click.option('--limit', type=int, default=0, help='Clips at most; 0: all.')
@click.option('--val-share', type=float, default=0.1, show_default=True)
@click.option('--every-s', type=float, default=0.0, help='Spacing of t0 in recorded clips; '
              '0: 5.1 s alone.')
@click.option('--route-room', type=int, default=80, show_default=True,
              help='Prompt columns for a route block.')
@click.option('--device', default='', help='cuda or cpu; default: a GPU where there is one.')
@click.option('--seed', type=int, default=0, show_default=True)
@reports()
def train_cache_target(out: Path, **options: Any) -> Mapping[str, Any]:
    """Run a target once over recordings and keep what drafts learn from."""
    from rspec_planner.offline_observations import bag_observations
    from rspec_planner.train.cache_target import cache_target
    return cache_target(out, bag_source=bag_observations, **options)


@train.command('convert-draft')
@click.argument('source', type=click.Path(path_type=Path))
@click.option('--target', required=True, help='The checkpoint folder that it was trained for.')
@click.option('--out', type=click.Path(path_type=Path), required=True)
@click.option('--block', type=int, default=0, help='Anchor and proposals; 0: as config.json '
              'says.')
@click.option('--window', type=int, default=0, help='Context rows that it sees; 0: all.')
@click.option('--revision', default='', help='Git revision for the manifest.')
@reports()
def train_convert_draft(source: Path, out: Path, **options: Any) -> Mapping[str, Any]:
    """Turn a public DFlash or EAGLE-3 draft into a checkpoint of ours."""
    from rspec_planner.train.convert_draft import convert_draft
    return convert_draft(source, out, **options)


@click.group(context_settings=CONTEXT)
def bench() -> None:
    """Measure latency on this machine."""


def device_options(frames: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a bench of the device-resident loop the options that all of them have."""
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((
                click.option('--frames', type=int, default=frames, show_default=True),
                click.option('--length', 'lengths', type=float, multiple=True,
                             default=(4.6, 7.4), show_default=True,
                             help='Forced accepted length, may be repeated.'),
                click.option('--trace', type=click.Path(path_type=Path, exists=True),
                             help='Also replay recorded accepted lengths.'),
                click.option('--block', type=int, default=16, show_default=True,
                             help='Width of a verify.'),
                click.option('--eager', type=int, default=3, show_default=True,
                             help='Frames of the transformers baseline, 0 for none.'),
                click.option('--pdl', is_flag=True,
                             help='Let the start of a kernel overlap the end of the last.'),
                click.option('--fp8', is_flag=True,
                             help='Prefill, verify and flow read e4m3 weights.'),
                click.option('--plans', type=click.Path(path_type=Path, exists=True),
                             help='How products are cut, written by bench kernels; '
                             'plans_fp8.json of bench fp8 is read where it lies beside.'))):
            function = option(function)
        return function
    return decorate


def use_plans(plans: Path | None) -> None:
    """Load a file of plans, if one is given, and those of fp8 products that lie beside it."""
    if plans is not None:
        from rspec_planner.engine import cuda_fp8_tune, cuda_tune
        from rspec_planner.engine.cuda_fp8 import PLANS_FILE
        cuda_tune.load_plans(plans)
        beside = plans.with_name(PLANS_FILE)
        if beside.exists():
            cuda_fp8_tune.load_plans(beside)


@bench.command('decode')
@click.option('--profile', default='tiny', show_default=True, help='Shapes; random weights.')
@click.option('--device', default='cpu', show_default=True)
@click.option('--loop', 'loops', multiple=True, help='while, sync, pipelined or eager; '
              'may be repeated. Default: the first three, on a CPU the last.')
@device_options(frames=20)
@reports()
def bench_decode(profile: str, device: str, plans: Path | None, **options: Any
                 ) -> Mapping[str, Any]:
    """
    Time the reasoning of the device-resident loop, at forced accepted lengths.

    autovla and autovla-tiny: the answer, words and actions, under the host's loop.
    """
    if profile.startswith('autovla'):
        from rspec_planner.evaluate.bench_autovla import bench_autovla
        return bench_autovla(profile, device, options['frames'], lengths=options['lengths'],
                             block=options['block'])
    use_plans(plans)
    from rspec_planner.evaluate.bench_decode import bench_decode as measure
    return measure(profile, device, **options)


@bench.command('kernels')
@click.option('--profile', default='tiny', show_default=True, help='Shapes; random weights.')
@click.option('--device', default='cpu', show_default=True)
@click.option('--plans', type=click.Path(path_type=Path), help='Tune, and write the plans here.')
@click.option('--limit', type=int, default=7, show_default=True, help='Plans tried a product.')
@reports()
def bench_kernels(profile: str, device: str, plans: Path | None, limit: int
                  ) -> Mapping[str, Any]:
    """Check the kernels against their references, tune and time them."""
    from rspec_planner.evaluate.bench_kernels import bench_kernels as measure
    return measure(profile, device, plans=plans, limit=limit)


@bench.command('fp8')
@click.option('--profile', default='tiny', show_default=True, help='Shapes; random weights.')
@click.option('--device', default='cpu', show_default=True)
@click.option('--plans', type=click.Path(path_type=Path),
              help='Tune, and write the plans here; plans_fp8.json is found by other benches.')
@click.option('--limit', type=int, default=5, show_default=True, help='Plans tried a product.')
@reports()
def bench_fp8(profile: str, device: str, plans: Path | None, limit: int) -> Mapping[str, Any]:
    """Check, tune and time the fp8 kernels, and what each of them stands in for."""
    from rspec_planner.evaluate.bench_fp8 import bench_fp8 as measure
    return measure(profile, device, plans=plans, limit=limit)


@bench.command('device-frame')
@click.option('--profile', default='alpamayo-r1', show_default=True,
              help='Shapes; random weights.')
@click.option('--device', default='cuda', show_default=True)
@click.option('--loop', default='', help='while, sync, pipelined or eager.')
@click.option('--samples', type=int, default=1, show_default=True,
              help='Candidate trajectories of one prefill.')
@click.option('--reuse-in', default='verify', show_default=True,
              help="Where a reused text is verified: 'verify' by narrow forwards, exact, or "
              "'prefill'.")
@click.option('--per-prompt', type=int, default=8, show_default=True,
              help='Frames of one prompt, each way twice; all must say what decoding it token by '
              'token says.')
@device_options(frames=50)
@reports()
def bench_device_frame(profile: str, device: str, plans: Path | None, **options: Any
                       ) -> Mapping[str, Any]:
    """Time whole frames of the device-resident planner; bench frame calls it for alpamayo-r1."""
    use_plans(plans)
    from rspec_planner.evaluate.bench_device_frame import bench_device_frame as measure
    return measure(profile, device, **options)


@bench.command('gpu')
@click.option('--profile', default='alpamayo-r1', show_default=True,
              help='Shapes; random weights.')
@click.option('--device', default='cuda', show_default=True)
@click.option('--out', type=click.Path(path_type=Path), default=Path('out/gpu'),
              show_default=True, help='Receives one JSON file a step, and the plans.')
@click.option('--seconds', type=float, default=450.0, show_default=True,
              help='No step begins that would probably end later.')
@click.option('--only', default='', help='Steps to run, by commas. Default: all.')
@click.option('--plans', type=click.Path(path_type=Path, exists=True),
              help='Use these plans and do not tune.')
@click.option('--trace', type=click.Path(path_type=Path, exists=True),
              help='Also replay recorded accepted lengths.')
@reports()
def bench_gpu(profile: str, device: str, out: Path, seconds: float, only: str,
              plans: Path | None, trace: Path | None) -> Mapping[str, Any]:
    """Check, tune and measure the device-resident planner in one go."""
    use_plans(plans)
    from rspec_planner.evaluate.gpu_session import run_session
    return run_session(profile, device, out, seconds, [part for part in only.split(',') if part],
                       tune=plans is None, trace=trace)


@bench.command('frame')
@click.option('--profile', default='', help="Default: the checkpoint's, or tiny.")
@click.option('--device', default='cpu', show_default=True)
@click.option('--frames', type=int, default=40, show_default=True,
              help='Measured frames, after some of warm-up.')
@click.option('--checkpoint', type=click.Path(path_type=Path),
              help="A folder in place of the profile's embedded weights.")
@click.option('--seed', type=int, default=0, show_default=True, help='Seed of the drive.')
@click.option('--draft', default='default', show_default=True,
              help="An embedded draft by name, a folder, or 'none'.")
@click.option('--tokens', type=int, help="Budget of a reasoning. Default: the profile's; random "
              'weights spend all of it.')
@click.option('--fp8', is_flag=True,
              help='Prefill, verify and flow read e4m3 weights; alpamayo-r1 only.')
@click.option('--loop', default='', help='while, sync, pipelined, eager or host. Default: '
              'while on a GPU, host on a CPU.')
@click.option('--reuse-in', default='verify', show_default=True,
              help="Where a reused text is verified: 'verify' by narrow forwards, exact, or "
              "'prefill'.")
@click.option('--per-prompt', type=int, default=8, show_default=True,
              help='Frames of one prompt, each way twice; all must say what decoding it token by '
              'token says.')
@click.option('--trace', type=click.Path(path_type=Path, exists=True),
              help='Also replay recorded accepted lengths; alpamayo-r1 only.')
@click.option('--eager', type=int, default=3, show_default=True,
              help='Frames of the transformers baseline of alpamayo-r1, 0 for none.')
@click.option('--plans', type=click.Path(path_type=Path, exists=True),
              help='How products are cut, written by bench kernels.')
@reports()
def bench_frame(profile: str, device: str, frames: int, checkpoint: Path | None, seed: int,
                draft: str, tokens: int | None, fp8: bool, loop: str, reuse_in: str,
                per_prompt: int, trace: Path | None, eager: int, plans: Path | None
                ) -> Mapping[str, Any]:
    """
    Time whole frames stage by stage, and compare what they say and drive.

    alpamayo-r1 without a checkpoint: random weights, as bench device-frame does. A checkpoint's
    folder says which profile it holds; another --profile is refused.
    """
    use_plans(plans)
    if profile == 'alpamayo-r1' and checkpoint is None:
        from rspec_planner.evaluate.bench_device_frame import bench_device_frame as measure_r1
        return measure_r1(profile, device, frames, fp8=fp8, loop=loop, reuse_in=reuse_in,
                          per_prompt=per_prompt, trace=trace, eager=eager)
    if fp8:
        raise ConfigurationError('--fp8 times the device-resident frame: add --profile '
                                 'alpamayo-r1, or use bench device-frame')
    from rspec_planner.evaluate.bench import bench_frame as measure
    return measure(profile, device, frames, checkpoint=checkpoint, seed=seed, draft=draft,
                   loop=loop, tokens=tokens, reuse_in=reuse_in)
