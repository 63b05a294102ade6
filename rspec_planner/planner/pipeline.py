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
The planner: one Observation in, one Plan out, through the stages of the engine.

preprocess, encode, prefill, decode, action, postprocess. Same observation and seed, same Plan,
bit for bit; frames seen before are not encoded again, which changes no bit either. A draft or the
last reasoning change how wide the target's forwards are; wider products round differently, which
moves paths by micrometres, and words only at a tie (`rspec eval exactness` looks for one). In the
device-resident frame all narrow products round alike, and neither changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.engine.cuda_fp8 import Fp8Weights, quantise_target
from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft import Draft
from rspec_planner.model.flow import start_noise
from rspec_planner.model.target import Target
from rspec_planner.model.unicycle import UnicycleActionSpace
from rspec_planner.planner.caution import Arrays, Caution
from rspec_planner.planner.checkpoints import existing_device, open_checkpoint, open_draft
from rspec_planner.planner.device_stages import DeviceStages
from rspec_planner.planner.drafts import checkpoint_folder
from rspec_planner.planner.frame_stages import FrameStages, StageMaker, Stages, torch_stages
from rspec_planner.planner.history import yaw_of
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan, Reasoning, Verdict
from rspec_planner.planner.prompt import build_prompt, max_prompt_length
from rspec_planner.planner.timing import StageTimer
from rspec_planner.planner.tokenizer import TextTokenizer
from rspec_planner.planner.trajectory import check_trajectory, DEFAULT_LIMITS, TrajectoryLimits
from rspec_planner.planner.vision_cache import FrameFeatures, VisionCache

__all__ = ['Planner', 'StageMaker', 'Stages', 'medoid', 'torch_stages']

Floats = NDArray[np.float64]

_CAPACITY_BUCKET = 64
_UNTOLD = 'none: the device-resident loop does not tell how sure the target is (engine.loop)'


@dataclass(frozen=True)
class _Rollout:
    """Integrated samples, 65 points each, ego frame at t0."""

    poses: Floats  # (N, 65, 4)
    speeds: Floats  # (N, 65)
    accelerations: Floats  # (N, 65)
    curvatures: Floats  # (N, 65)

    def sample(self, index: int) -> Arrays:
        """Return poses, speeds, accelerations and curvatures of one sample."""
        return (self.poses[index], self.speeds[index], self.accelerations[index],
                self.curvatures[index])


class Planner:
    """Plans frame by frame; one thread at a time."""

    def __init__(self, target: Target, tokenizer: TextTokenizer, *, seed: int = 0,
                 num_samples: int = 1, flow_steps: int | None = None,
                 max_reasoning_tokens: int | None = None, use_vision_cache: bool = True,
                 draft: Draft | None = None, reuse: bool = False,
                 make_stages: StageMaker = torch_stages,
                 limits: TrajectoryLimits = DEFAULT_LIMITS, loop: str = 'host',
                 guess_in: str = 'verify', widest: int = 0,
                 fp8: Fp8Weights | None = None, caution: bool = True) -> None:
        """
        Without a draft decode autoregressively; `reuse` verifies the last text first.

        loop: 'host' runs what make_stages makes, anything else the device-resident frame, for
        which guess_in says where a text is verified and widest as how wide a draft's its products
        round, see `DeviceStages`. fp8: what `quantise_target` made of the target; only the
        device-resident frame reads it. caution: slow plans down while the target is unsure of its
        words, where its profile says what unsure is (`ProfileConfig.caution`).
        """
        if fp8 is not None and loop == 'host':
            raise ConfigurationError("fp8 needs the device-resident frame: give loop 'while' "
                                     "(engine.loop) instead of 'host', or another precision")
        self.profile: ProfileConfig = target.cfg
        self.device = target.device
        self.precision = str(target.dtype).removeprefix('torch.') + (
            ', fp8 weights' if fp8 is not None else '')
        self.executors: Mapping[str, str] = {'backend': 'torch'}  # what a diagnostic shows
        self.tokenizer = tokenizer
        self._budget = _positive('max_reasoning_tokens', max_reasoning_tokens,
                                 target.cfg.max_reasoning_tokens)
        self._flow_steps = _positive('flow_steps', flow_steps, target.cfg.flow.num_steps)
        samples = _positive('num_samples', num_samples, 1)
        longest = max_prompt_length(target.cfg, tokenizer)
        rows = _cache_rows(target.cfg, longest + self._budget, draft)
        self.draft_name = (draft.cfg.name or draft.cfg.label) if draft is not None else ''
        self._stages: FrameStages
        if loop == 'host':
            self._stages = make_stages(target, rows, samples, self._budget, draft)
        else:
            self._stages = DeviceStages(target, prompt=longest, budget=self._budget,
                                        samples=samples, steps=self._flow_steps, draft=draft,
                                        loop=loop, guess_in=guess_in, reuse=reuse, widest=widest,
                                        fp8=fp8)
            self.executors = {**self.executors, 'loop': loop}
        self._target, self._quantised = target, fp8 is not None
        self._reuse, self._limits = reuse, limits
        self._caution = Caution(target.cfg.caution, -limits.acceleration_mps2[0]) \
            if caution and target.cfg.caution else None
        if self._caution is not None and loop != 'host':
            self.executors = {**self.executors, 'caution': _UNTOLD}
        self._last_ids: tuple[int, ...] = ()
        images = len(target.cfg.cameras.names) * target.cfg.cameras.frames
        self._cache = VisionCache(2 * images) if use_vision_cache else None
        self._space = UnicycleActionSpace(target.cfg.action_space)
        self._noise = _noise(target, samples, seed)
        self._synchronize = _synchronizer(target.device) if loop == 'host' else None

    @classmethod
    def load(cls, checkpoint: str | Path = 'tiny', *, device: str = 'cpu', seed: int = 0,
             num_samples: int = 1, flow_steps: int | None = None,
             max_reasoning_tokens: int | None = None, use_vision_cache: bool = True,
             draft: str | None = None, reuse: bool = False,
             dtype: torch.dtype | None = None,
             make_stages: StageMaker = torch_stages,
             limits: TrajectoryLimits = DEFAULT_LIMITS, loop: str = 'host',
             guess_in: str = 'verify', fp8: bool = False, caution: bool = True) -> Planner:
        """
        Load a checkpoint folder, or an embedded one by name ('tiny').

        draft: see `checkpoints.chosen_draft`; None decodes autoregressively. dtype: of weights
        and caches, see `checkpoints.open_checkpoint`; with fp8, of all that fp8 leaves alone.
        make_stages: what executes the networks. loop, guess_in: see the constructor.
        Raises EngineError for a missing or damaged file and ConfigurationError for an argument
        that makes no sense.
        """
        directory = checkpoint_folder(checkpoint)
        place = existing_device(device)
        if fp8 and dtype is None and place.type == 'cuda':
            dtype = torch.bfloat16
        target, tokenizer = open_checkpoint(directory, place, dtype)
        routine = open_draft(draft, directory, target)
        return cls(target, tokenizer, seed=seed, num_samples=num_samples,
                   flow_steps=flow_steps, max_reasoning_tokens=max_reasoning_tokens,
                   use_vision_cache=use_vision_cache, draft=routine, reuse=reuse,
                   make_stages=make_stages, limits=limits, loop=loop, guess_in=guess_in,
                   fp8=quantise_target(target) if fp8 else None, caution=caution)

    @property
    def host_syncs(self) -> int | None:
        """Return how often the host waited for the device in the last frame, if it is known."""
        return self._stages.host_syncs if isinstance(self._stages, DeviceStages) else None

    def alone(self) -> Planner:
        """
        Return a planner over the same weights without draft, reuse and cached features.

        One token per forward of the PyTorch executors: what this planner's words are checked
        against.
        """
        if self._quantised:
            raise ConfigurationError('fp8: the PyTorch executors cannot read these weights; load '
                                     'the checkpoint in another precision to compare')
        return Planner(self._target, self.tokenizer, max_reasoning_tokens=self._budget,
                       flow_steps=1, use_vision_cache=False, limits=self._limits,
                       caution=False)

    def reset(self) -> None:
        """Drop what is cached from earlier frames."""
        self._last_ids = ()
        if self._cache is not None:
            self._cache.clear()
        if self._caution is not None:
            self._caution.reset()

    def plan(self, observation: Observation) -> Plan:
        """
        Return the plan of one observation; its verdict says whether anyone may drive it.

        Raises InputError when the observation does not fit the profile.
        """
        timer = StageTimer(self._synchronize)
        with timer.stage('preprocess'):
            _check(observation, self.profile)
            prompt = build_prompt(self.profile, self.tokenizer, observation.ego_poses,
                                  observation.navigation_text)
            guess = self._stages.begin(prompt, self._last_ids if self._reuse else ())
        made = self._stages.run(prompt, guess, lambda: self._encode(observation), self._noise,
                                self._flow_steps, timer)
        self._last_ids = made.generated
        with timer.stage('postprocess'):
            reasoning = self._read(made.generated, made.stats)
            rollout = self._integrate(made.actions, observation)
            driven = rollout.sample(medoid(rollout.poses))
            cautious = False
            if self._caution is not None:
                cautious, driven = self._caution.drive(observation.t0_ns, made.stats.confidence,
                                                       driven)
            verdict = self._judge(driven, reasoning)
        poses, speeds, accelerations, curvatures = driven
        return Plan(
            t0_ns=observation.t0_ns, poses=poses, speeds=speeds, accelerations=accelerations,
            curvatures=curvatures, cautious=cautious,
            candidates=rollout.poses, candidate_speeds=rollout.speeds,
            ego_pose_at_t0=observation.ego_pose_at_t0,
            odometry_frame=observation.odometry_frame, reasoning=reasoning,
            times=timer.times(), verdict=verdict, ages_ms=dict(observation.ages_ms))

    def _encode(self, observation: Observation) -> None:
        """
        Put the features of all images into the prefill's buffers, new ones encoded.

        Images of unknown stamps come first: a GPU encodes them while the others' pixels are
        compared here.
        """
        slots = [divmod(slot, observation.images.shape[1])
                 for slot in range(observation.images.shape[0] * observation.images.shape[1])]
        if self._cache is None:
            self._encode_all(observation, slots)
            return
        names, stamps = observation.camera_names, observation.image_stamps_ns
        known = {(camera, frame) for camera, frame in slots
                 if self._cache.knows(names[camera], int(stamps[camera, frame]))}
        self._encode_all(observation, [slot for slot in slots if slot not in known])
        changed = []
        for camera, frame in sorted(known):
            held = self._cache.get(names[camera], int(stamps[camera, frame]),
                                   observation.images[camera, frame])
            if held is None:
                changed.append((camera, frame))
            else:
                self._place(camera, frame, held)
        self._encode_all(observation, changed)
        self._cache.prune(observation.t0_ns)

    def _encode_all(self, observation: Observation, slots: list[tuple[int, int]]) -> None:
        """Encode the images of slots (camera, frame) in as many calls as they need."""
        per_call = self._stages.vision.inputs['images'].shape[0]
        for start in range(0, len(slots), per_call):
            self._encode_call(observation, slots[start:start + per_call])

    def _encode_call(self, observation: Observation, slots: list[tuple[int, int]]) -> None:
        """Run the vision stage once over at most as many images as it takes."""
        outputs = self._stages.vision.outputs
        self._stages.encode([observation.images[slot] for slot in slots])
        for row, (camera, frame) in enumerate(slots):
            made = FrameFeatures(outputs['features'][row], outputs['deepstack'][:, row])
            self._place(camera, frame, made)
            if self._cache is not None:
                self._cache.put(observation.camera_names[camera],
                                int(observation.image_stamps_ns[camera, frame]),
                                observation.images[camera, frame].copy(), made)

    def _place(self, camera: int, frame: int, made: FrameFeatures) -> None:
        slot = camera * self.profile.cameras.frames + frame
        self._stages.features[slot].copy_(made.features)
        self._stages.deepstack[:, slot].copy_(made.deepstack)

    def _read(self, ids: tuple[int, ...], stats: DecodeStats) -> Reasoning:
        """Return the reasoning of generated ids; its text ends at <|cot_end|>."""
        tokens = self.profile.tokens
        end = ids.index(tokens.cot_end) if tokens.cot_end in ids else len(ids)
        return Reasoning(ids, self.tokenizer.decode(ids[:end]),
                         ids[-1] == tokens.traj_future_start, stats)

    def _integrate(self, actions: Tensor, observation: Observation) -> _Rollout:
        """Roll the samples out in fp64 from the speed that the history implies."""
        history = observation.ego_poses
        with torch.inference_mode():
            v0 = self._space.initial_speed(torch.from_numpy(history[None, :, :2, 3]),
                                           torch.from_numpy(yaw_of(history)[None]))
            v0 = v0.clamp(min=0.0).expand(actions.shape[0])
            wide = actions.cpu().double()
            xy, yaw, speed = self._space.integrate(wide, v0, floor_at_zero=True)
            curvature = self._space.denormalise(wide)[..., 1]
            applied = torch.diff(speed, dim=-1, prepend=v0[:, None]) / self._space.cfg.dt
        poses = np.zeros((actions.shape[0], xy.shape[1] + 1, 4))
        poses[:, 1:, :2] = xy.numpy()
        poses[:, 1:, 3] = yaw.numpy()
        measured = np.full((actions.shape[0], 1), max(float(observation.speed_mps), 0.0))
        # an action holds over the interval behind its point; the last point repeats it
        return _Rollout(poses, np.concatenate([measured, speed.numpy()], axis=1),
                        _repeat_last(applied.numpy()), _repeat_last(curvature.numpy()))

    def _judge(self, driven: Arrays, reasoning: Reasoning) -> Verdict:
        """Return the verdict on what is about to be said and driven."""
        if not reasoning.complete:
            return Verdict(False, 'reasoning_incomplete',
                           f'no <|traj_future_start|> within {len(reasoning.token_ids)} tokens, '
                           f'budget {self._budget}')
        # a NaN is the largest of all logits: that of the stop token ends every text at once
        if len(reasoning.token_ids) < 2 or not reasoning.text:
            return Verdict(False, 'reasoning_empty', 'nothing was said before '
                           '<|traj_future_start|>; check weights and precision for NaN')
        return check_trajectory(*driven, self._limits)


def _cache_rows(cfg: ProfileConfig, longest: int, draft: Draft | None) -> int:
    """Return the cache's capacity: a block and the expert's scratch rows follow the text."""
    rows = longest + (draft.cfg.block if draft is not None else 1) + cfg.action_space.n_waypoints
    return rows + -rows % _CAPACITY_BUCKET


def medoid(poses: Floats) -> int:
    """Return the index of the sample (N, 65, 4) with the least mean distance to the others."""
    if len(poses) == 1:
        return 0
    difference = poses[:, None, :, :2] - poses[None, :, :, :2]
    return int(np.argmin(np.linalg.norm(difference, axis=-1).mean(axis=(1, 2))))


def _repeat_last(values: Floats) -> Floats:
    """Return (N, 65) of (N, 64)."""
    return np.concatenate([values, values[:, -1:]], axis=1)


def _positive(name: str, value: int | None, default: int) -> int:
    """Return the value or its default; ConfigurationError below 1."""
    chosen = default if value is None else value
    if chosen < 1:
        raise ConfigurationError(f'{name}: {chosen}, must be at least 1')
    return chosen


def _synchronizer(device: torch.device) -> Callable[[], None] | None:
    return torch.cuda.synchronize if device.type == 'cuda' else None


def _noise(target: Target, samples: int, seed: int) -> Tensor:
    """Return the flow's noise (N, 64, 2): of the seed alone, the same for every frame."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, target.cfg.action_space.n_waypoints, 2)
    noise = torch.randn(shape, generator=generator)
    return start_noise(noise, target.cfg.flow.noise_scale).to(target.device)


def _check(observation: Observation, profile: ProfileConfig) -> None:
    """Raise InputError for the first field that does not fit the profile."""
    cameras = profile.cameras
    images = (len(cameras.names), cameras.frames, cameras.height, cameras.width, 3)
    if observation.camera_names != cameras.names:
        raise InputError(f'camera_names: {observation.camera_names}, the profile needs '
                         f'{cameras.names} in this order')
    for name, array, shape in (
            ('images', observation.images, images),
            ('image_stamps_ns', observation.image_stamps_ns, images[:2]),
            ('ego_poses', observation.ego_poses, (profile.history.num_poses, 4, 4)),
            ('ego_pose_at_t0', observation.ego_pose_at_t0, (4, 4))):
        if array.shape != shape:
            raise InputError(f'{name}: shape {array.shape}, the profile needs {shape}')
    if observation.images.dtype != np.uint8:
        raise InputError(f'images: {observation.images.dtype}, must be uint8 RGB')
    for name, values in (('ego_poses', observation.ego_poses),
                         ('ego_pose_at_t0', observation.ego_pose_at_t0),
                         ('speed_mps', np.asarray(observation.speed_mps))):
        if not np.isfinite(values).all():
            raise InputError(f'{name}: not finite; check the odometry')
