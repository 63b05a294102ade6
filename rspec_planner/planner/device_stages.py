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
The planner's frames on the device-resident loop: one synchronisation with the host a frame.

Real weights, any draft, temporal reuse and N candidates; the host writes prompt and new images,
and reads tokens and actions. The same launches run on a CPU, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.engine.cuda_fp8 import Fp8Weights
from rspec_planner.engine.cuda_graph import CapturedExecutor, FrameRunner, MODES
from rspec_planner.engine.cuda_loop import DeviceFrame, NARROW
from rspec_planner.engine.cuda_vision import Tower
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.torch_executor import vision_executor
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.draft import Draft
from rspec_planner.model.target import Target
from rspec_planner.planner.frame_stages import Outcome
from rspec_planner.planner.prompt import Prompt
from rspec_planner.planner.reasoner import GUESS_ROOM
from rspec_planner.planner.timing import StageTimer

#: where a guess at the text is verified: inside the prefill, or by the verifies behind it
GUESS_PLACES = ('prefill', 'verify')


class DeviceStages:
    """See `frame_stages.FrameStages`; graphs are captured in the first frame."""

    def __init__(self, target: Target, *, prompt: int, budget: int, samples: int, steps: int,
                 draft: Draft | None, loop: str, guess_in: str = 'verify',
                 reuse: bool = True, widest: int = 0, fp8: Fp8Weights | None = None) -> None:
        """
        Make buffers for prompts of up to `prompt` tokens and texts of up to `budget`.

        loop: see `engine.cuda_graph`. guess_in: one of GUESS_PLACES. Without `reuse` no guess is
        taken, and no row waits for one. widest: the widest verify of other stages that must say
        the same bit for bit, see `DeviceFrame`. fp8: what `quantise_target` made of the target.
        Raises ConfigurationError for unknown names and for a draft that does not run on the
        device.
        """
        if loop not in MODES:
            raise ConfigurationError(f"loop '{loop}': use one of {', '.join(MODES)}, or host")
        if guess_in not in GUESS_PLACES:
            raise ConfigurationError(f"guess_in '{guess_in}': use one of "
                                     f'{", ".join(GUESS_PLACES)}')
        narrow = reuse and guess_in == 'verify'
        inside = min(budget, GUESS_ROOM) if reuse and not narrow else 0
        self._room = budget if narrow else inside
        self.frame = DeviceFrame(target, prompt_rows=prompt + inside, budget=budget, draft=draft,
                                 guess_room=inside, samples=samples, flow_steps=steps,
                                 width=NARROW if narrow else 1, narrow_guess=narrow,
                                 widest=widest, fp8=fp8)
        self._loop, self._steps, self._budget = loop, steps, budget
        self._block = draft.cfg.block if draft is not None else 1
        cameras = target.cfg.cameras
        images = len(cameras.names) * cameras.frames
        tower = Tower(target.vision, target.cfg.patch_grid, self.frame.kernels, target.device) \
            if target.device.type == 'cuda' else None  # a CPU has no passes to save
        self.vision: Executor = CapturedExecutor(
            vision_executor(target, len(cameras.names), tower))
        place = (images, target.cfg.tokens_per_image, target.cfg.text.hidden_size)
        self.features: Tensor = self.frame.prefill.features.view(place)
        self.deepstack: Tensor = self.frame.prefill.deepstack.view(-1, *place)
        # a copy from pageable memory would wait for the device
        self._uploads = torch.zeros((images, cameras.height, cameras.width, 3), dtype=torch.uint8,
                                    pin_memory=target.device.type == 'cuda')
        self._uploaded = 0
        self._runner: FrameRunner | None = None

    @property
    def host_syncs(self) -> int:
        """Return how often the host waited for the device in the last frame."""
        return self._runner.host_syncs if self._runner is not None else 0

    def begin(self, prompt: Prompt, guess: Sequence[int]) -> tuple[int, ...]:
        """Write the frame's prompt and guess to the device."""
        kept = tuple(guess[:self._room])
        self._begin(prompt, kept)
        self._uploaded = 0
        if self._runner is None:  # the capture spends a frame
            self._runner = FrameRunner(self.frame, self._loop)
            self._begin(prompt, kept)
        return kept

    def _begin(self, prompt: Prompt, guess: Sequence[int]) -> None:
        self.frame.begin(torch.from_numpy(prompt.token_ids), torch.from_numpy(prompt.positions),
                         prompt.rope_delta, self._budget, guess)

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> None:
        """Run the vision stage on images (H, W, 3)."""
        first, count = self._uploaded, len(images)
        self._uploaded = first + count
        for row, image in zip(self._uploads[first:], images):
            row.copy_(torch.from_numpy(image))
        self.vision.inputs['images'][:count].copy_(self._uploads[first:first + count],
                                                   non_blocking=True)
        self.vision.enqueue()

    def run(self, prompt: Prompt, guess: tuple[int, ...], encode: Callable[[], None],
            noise: Tensor, steps: int, timer: StageTimer) -> Outcome:
        """
        Run the frame that was begun, see `FrameStages`.

        Prefill, decode and action are timed on the device's clock; encode gets the rest of the
        time that passes on the host, its launches included.
        """
        if self._runner is None or steps != self._steps:
            raise EngineError(f'{steps} flow steps, or a frame that was not begun: the frame was '
                              f'built for {self._steps}; call begin first')
        started = perf_counter()
        self.frame.frame.noise.copy_(noise)
        encode()
        self._runner.run()
        result = self.frame.frame.result()
        spent, stages = 1e3 * (perf_counter() - started), self._runner.stage_ms
        for name in ('prefill', 'decode', 'action'):
            timer.add(name, stages[name])
            spent -= stages[name]
        timer.add('encode', max(spent, 0.0))
        stats = DecodeStats(len(result.committed), result.committed, 0.0, stages['decode'],
                            result.reused, result.closing_forwards, self._block)
        return Outcome(result.generated, stats, result.actions)
