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
Write a checkpoint of a profile's full shapes with random weights, load it, drive it, compare it.

It proves what can be proven without the released weights: that a folder of their layout and size
loads, in what time and memory, that a whole frame runs on it, and that transformers, reading
the same files on its own, computes the same. Every step reports for itself; one that fails does
not take the others' numbers with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import gc
from pathlib import Path
import shutil
from time import perf_counter
import traceback
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.bench import hardware
from rspec_planner.evaluate.reference_backbone import ReferenceBackbone
from rspec_planner.evaluate.synthetic_checkpoint import write_checkpoint
from rspec_planner.evaluate.synthetic_tokenizer import write_tokenizer_folder
from rspec_planner.model.config import alpamayo_1_5, alpamayo_r1, ProfileConfig
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.text import KVCache, place_visual
from rspec_planner.model.upstream_folder import examine_folder, fingerprint
from rspec_planner.planner.checkpoints import open_checkpoint
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.prompt import build_prompt, Prompt

PROFILES: dict[str, tuple[Callable[[], ProfileConfig], str]] = {
    'alpamayo-r1': (alpamayo_r1, 'alpamayo_r1'), 'alpamayo-1.5': (alpamayo_1_5, 'alpamayo1_5')}
#: words of a frame; random weights never end a text
TOKENS = 18
#: last rows of the prompt whose logits are compared
ROWS = 64
FRAMES = 6
FOLDER = 'checkpoint'
#: largest relative error of a half-precision part against transformers
HALF_TOLERANCE = 2e-2


@dataclass
class Run:
    """What is measured, on what, and what was found so far."""

    profile: ProfileConfig
    model_type: str
    folder: Path
    device: torch.device
    dtype: torch.dtype
    loop: str
    shards: int
    seconds: float
    started: float = field(default_factory=perf_counter)
    found: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, work: Callable[[], dict[str, Any]], estimate: float = 0.0) -> bool:
        """Run one step unless it would probably end too late; return whether it went well."""
        spent = perf_counter() - self.started
        if spent + estimate > self.seconds:
            self.found[name] = {'ok': False, 'error': f'left out: {spent:.0f} s are spent'}
            return False
        begun = perf_counter()
        try:
            result = {'ok': True, **work()}
        except Exception as error:  # one step must not take the others' numbers with it
            result = {'ok': False, 'error': ' '.join(f'{type(error).__name__}: {error}'.split()),
                      'traceback': traceback.format_exc()}
        result['seconds'] = round(perf_counter() - begun, 2)
        self.found[name] = result
        return bool(result['ok'])

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)


def bench_checkpoint(profile: str | ProfileConfig = 'alpamayo-r1', device: str = 'cuda',
                     out: Path = Path('out/checkpoint'), *, seconds: float = 235.0,
                     keep: bool = False, loop: str = '', shards: int = 5,
                     dtype: torch.dtype | None = None) -> dict[str, Any]:
    """
    Write, examine, load, drive and compare; the folder is removed at the end unless kept.

    seconds: no step begins that would probably end later. loop: see `planner.device_stages`.
    dtype: bfloat16 on a GPU, float32 elsewhere.
    """
    place = torch.device(device)
    known, model_type = PROFILES.get(str(profile), (None, 'alpamayo_r1'))
    if isinstance(profile, str):
        if known is None:
            raise ConfigurationError(f"profile '{profile}': use one of {', '.join(PROFILES)}")
        profile = known()
    folder = out / FOLDER
    if folder.exists():
        raise ConfigurationError(f'{folder} exists: remove it, or give another --out')
    run = Run(profile, model_type, folder, place,
              dtype or (torch.bfloat16 if place.type == 'cuda' else torch.float32),
              loop or ('while' if place.type == 'cuda' else 'host'), shards, seconds)
    try:
        if run.step('write', lambda: _write(run)):
            run.step('doctor', lambda: _doctor(run))
            _use(run)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return {'profile': profile.name, 'model_type': model_type, 'device': device,
            'hardware': hardware(place), 'torch': torch.__version__, 'weights': 'random',
            'precision': str(run.dtype).removeprefix('torch.'),
            'checkpoint': str(folder) if keep else '', **run.found,
            'total_seconds': round(perf_counter() - run.started, 1),
            'ok': all(step['ok'] for step in run.found.values())}


def _write(run: Run) -> dict[str, Any]:
    """Draw the weights where they are cheap and write them shard by shard."""
    size = write_checkpoint(run.folder, run.profile, run.model_type, device=run.device,
                            shards=run.shards)
    write_tokenizer_folder(run.folder)
    if run.device.type == 'cuda':
        torch.cuda.empty_cache()
    return {'bytes': size, 'shards': len(list(run.folder.glob('*.safetensors')))}


def _doctor(run: Run) -> dict[str, Any]:
    """Examine the folder from its headers alone."""
    started = perf_counter()
    report = examine_folder(run.folder)
    examined = perf_counter() - started
    return {'ok': not report.problems, 'problems': list(report.problems)[:5],
            'tensors': len(report.tensors), 'headers_s': round(examined, 3),
            'fingerprint': fingerprint(report)}


def _use(run: Run) -> None:
    """Load the folder, plan frames on it, and compare it with transformers."""
    held: dict[str, Any] = {'said': []}

    def load() -> dict[str, Any]:
        _reset_peak(run.device)
        started = perf_counter()
        held['target'], held['tokenizer'] = open_checkpoint(run.folder, run.device, run.dtype)
        run.wait()
        spent = perf_counter() - started
        size = sum(weight.nbytes for weight in held['target'].parameters())
        return {'load_s': round(spent, 2), 'bytes': size,
                'bytes_per_s': round(size / spent), 'parameters':
                held['target'].num_parameters(), **_memory(run.device)}

    if not run.step('load', load):
        return
    if not run.step('frame', lambda: _frames(run, held, run.loop)) and run.loop != 'host':
        run.step('frame_host', lambda: _frames(run, held, 'host'))
    gc.collect()
    run.step('compare', lambda: _compare(run, held), estimate=40.0)


def _reset_peak(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device) -> dict[str, float]:
    """Return the peak since the last reset, and what the whole device has in use, GB."""
    if device.type != 'cuda':
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {'peak_allocated_gb': round(torch.cuda.max_memory_allocated(device) / 1e9, 3),
            'peak_reserved_gb': round(torch.cuda.max_memory_reserved(device) / 1e9, 3),
            'device_used_gb': round((total - free) / 1e9, 3)}


def noise_observation(profile: ProfileConfig, seed: int = 0, frame: int = 0) -> Observation:
    """Return random images and a straight drive at 10 m/s; neighbouring frames share images."""
    cameras = profile.cameras
    t0_ns = 10_000_000_000 + frame * 100_000_000
    images = np.stack([np.stack([
        np.random.default_rng((seed, camera, frame + step)).integers(
            0, 256, (cameras.height, cameras.width, 3), dtype=np.uint8)
        for step in range(cameras.frames)]) for camera in range(len(cameras.names))])
    stamps = t0_ns + 100_000_000 * np.arange(1 - cameras.frames, 1, dtype=np.int64)
    poses = np.tile(np.eye(4), (profile.history.num_poses, 1, 1))
    poses[:, 0, 3] = np.arange(1 - profile.history.num_poses, 1)
    return Observation(t0_ns=t0_ns, camera_names=cameras.names, images=images,
                       image_stamps_ns=np.tile(stamps, (len(cameras.names), 1)),
                       ego_poses=poses, ego_pose_at_t0=np.eye(4), odometry_frame='map',
                       speed_mps=10.0)


def _frames(run: Run, held: dict[str, Any], loop: str) -> dict[str, Any]:
    """Plan frames: the first encodes all images and builds what is built once."""
    _reset_peak(run.device)
    planner = Planner(held['target'], held['tokenizer'], max_reasoning_tokens=TOKENS, loop=loop)
    times, stages = [], []
    for index in range(FRAMES):
        observation = noise_observation(run.profile, frame=index)
        run.wait()
        started = perf_counter()
        plan = planner.plan(observation)
        run.wait()
        times.append(1e3 * (perf_counter() - started))
        stages.append({name: getattr(plan.times, f'{name}_ms') for name in (
            'preprocess', 'encode', 'prefill', 'decode', 'action', 'postprocess')})
        held['said'] = held['said'] or list(plan.reasoning.token_ids)
        if not np.isfinite(plan.poses).all():
            raise ValueError(f'frame {index}: the plan is not finite')
    later = {name: round(float(np.median([each[name] for each in stages[1:]])), 2)
             for name in stages[0]}
    prompt = build_prompt(run.profile, planner.tokenizer, noise_observation(run.profile).ego_poses)
    return {'loop': loop, 'frames': FRAMES, 'tokens': len(held['said']),
            'prompt_tokens': prompt.length,
            'first_ms': round(times[0], 1), 'later_ms': round(float(np.median(times[1:])), 2),
            'later_stages_ms': later, **_memory(run.device)}


def _compare(run: Run, held: dict[str, Any]) -> dict[str, Any]:
    """Compare vision, cache, logits, text and velocity with transformers on the same files."""
    target, observation = held['target'], noise_observation(run.profile)
    prompt = build_prompt(run.profile, held['tokenizer'], observation.ego_poses)
    images = torch.from_numpy(observation.images).flatten(0, 1).to(run.device)
    ours = _read(run, target, prompt, images)
    reference = ReferenceBackbone(run.folder, run.device, run.dtype)
    theirs, said = _their_reading(run, reference, target, prompt, images, len(held['said']))
    found: dict[str, Any] = {'rows': ROWS, 'relative_error': _apart(ours, theirs),
                             'same_choices': _same(ours, theirs), 'of_choices': ROWS}
    common = next((i for i, (a, b) in enumerate(zip(held['said'], said)) if a != b),
                  len(held['said']))
    found |= {'same_words': common, 'of_words': len(held['said'])}
    if run.dtype == torch.float32:
        return {**found, 'ok': max(found['relative_error'].values()) <= 1e-4}
    for part in ('keys', 'values'):
        del ours[part], theirs[part]
    reference.widen()
    exact, _ = _their_reading(run, reference, target, prompt, images, 0)
    found['against_float32'] = {'ours': _apart(ours, exact), 'transformers':
                                _apart(theirs, exact)}
    return {**found, 'ok': _close_enough(found)}


def _close_enough(found: dict[str, Any]) -> bool:
    """
    Return whether a half-precision run agrees with transformers.

    Two bf16 computations that round at other places drift apart; so besides the bound, none of
    our parts may be clearly further from float32 than transformers' own. The velocity has passed
    two stacks of layers and has that second bound alone.
    """
    bounded = all(value <= HALF_TOLERANCE for name, value in found['relative_error'].items()
                  if name != 'velocity')
    ours, theirs = (found['against_float32'][side] for side in ('ours', 'transformers'))
    return bounded and all(ours[name] <= 1.25 * theirs[name] for name in ours)


@torch.inference_mode()
def _read(run: Run, target: Any, prompt: Prompt, images: Tensor) -> dict[str, Tensor]:
    """Return what our target makes of a prompt."""
    cfg, text = target.cfg, target.cfg.text
    features, deepstack = target.vision(patchify(images), cfg.patch_grid)
    ids = torch.from_numpy(prompt.token_ids).to(run.device)[None]
    positions = torch.from_numpy(prompt.positions).to(run.device)
    visual = ids == cfg.tokens.image_pad
    cache = KVCache(text, 1, prompt.length, target.dtype, run.device)
    tables = mrope_cos_sin(positions, text.head_dim, text.rope_theta, text.mrope_section)
    hidden = place_visual(target.text.embed(ids), visual, features)
    hidden = target.text(hidden, *tables, cache, 0, visual, deepstack)
    logits = target.text.logits(hidden[0, -ROWS:])
    noisy, t = _noise(run, cfg), torch.full((1,), 0.3, device=run.device)
    waypoints = cfg.action_space.n_waypoints
    steps = torch.arange(waypoints, device=run.device) + prompt.length + prompt.rope_delta
    tables = mrope_cos_sin(steps.expand(3, -1), text.head_dim, text.rope_theta,
                           text.mrope_section)
    context = target.expert.prepare(cache.keys, cache.values)
    return {'features': features.flatten(0, 1),
            'deepstack': torch.stack([part.flatten(0, 1) for part in deepstack]),
            'logits': logits, 'keys': cache.keys[:, 0], 'values': cache.values[:, 0],
            'velocity': target.expert.velocity(noisy, t, context, *tables)}


def _noise(run: Run, cfg: ProfileConfig) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((1, cfg.action_space.n_waypoints, 2), generator=generator).to(run.device)


def _their_reading(run: Run, reference: ReferenceBackbone, target: Any, prompt: Prompt,
                   images: Tensor, words: int) -> tuple[dict[str, Tensor], list[int]]:
    """Return what transformers makes of it, and its greedy text."""
    cfg = target.cfg
    patches, count = patchify(images).flatten(0, 1), len(images)
    ids = torch.from_numpy(prompt.token_ids).to(run.device)
    positions = torch.from_numpy(prompt.positions).to(run.device)
    features, deepstack = reference.see(patches, cfg.patch_grid, count)
    logits, cache = reference.read(ids, positions, patches, cfg.patch_grid, count, ROWS)
    found = {'features': features, 'deepstack': torch.stack(deepstack), 'logits': logits,
             'keys': torch.stack([layer.keys[0] for layer in cache.layers]),
             'values': torch.stack([layer.values[0] for layer in cache.layers]),
             'velocity': reference.velocity(target.expert, _noise(run, cfg),
                                            torch.full((1,), 0.3, device=run.device), cache,
                                            prompt.rope_delta)}
    said = reference.say(logits[-1].float(), cache, words, prompt.rope_delta,
                         (cfg.tokens.forbidden_start, cfg.tokens.forbidden_end))
    return found, said


def _apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return |ours - theirs| / |theirs| of each part."""
    return {name: float((ours[name].float() - theirs[name].float()).norm()
                        / theirs[name].float().norm()) for name in ours if name in theirs}


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> int:
    return int((ours['logits'].argmax(-1) == theirs['logits'].argmax(-1)).sum())
