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
Encoding of the images that are new in a frame, and the features of those seen before.

The tower attends within one image, so the features of an earlier frame's images stay exact. They
lie camera-major, oldest first, as the prompt wants them: a new frame moves every camera's
features one place back and puts the new ones last.
"""

from __future__ import annotations

import torch

from rspec_planner.engine.cuda_decoder import Prefill
from rspec_planner.model.image import patchify
from rspec_planner.model.target import Target


class Encoder:
    """Fills a prefill's features from `images` (cameras, H, W, 3) uint8 RGB, one per camera."""

    def __init__(self, target: Target, prefill: Prefill) -> None:
        cameras = target.cfg.cameras
        self._target = target
        count, frames = len(cameras.names), cameras.frames
        self.images = torch.zeros((count, cameras.height, cameras.width, 3), dtype=torch.uint8,
                                  device=target.device)
        place = (count, frames, target.cfg.tokens_per_image, target.cfg.text.hidden_size)
        self._features = prefill.features.view(place)
        self._deepstack = prefill.deepstack.view(-1, *place)

    def __call__(self) -> None:
        """Enqueue the tower and the move."""
        target = self._target
        vision = target.cfg.vision
        patches = patchify(self.images, vision.patch_size, vision.temporal_patch_size,
                           vision.spatial_merge_size)
        features, deepstack = target.vision(patches, target.cfg.patch_grid)
        self._features.copy_(self._features.roll(-1, dims=1))
        self._deepstack.copy_(self._deepstack.roll(-1, dims=2))
        self._features[:, -1] = features
        for place, part in zip(self._deepstack, deepstack):
            place[:, -1] = part
