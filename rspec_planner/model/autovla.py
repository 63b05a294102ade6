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
AutoVLA: vision tower and text decoder; the trajectory is said in action tokens.

State-dict prefixes against a released Qwen2.5-VL checkpoint: `vision.` is `visual.`, `text.` is
`model.` (but `text.lm_head.` is `lm_head.`, which a tied checkpoint leaves out).
"""

from __future__ import annotations

from torch import nn

from rspec_planner.model.autovla_config import AutoVlaConfig
from rspec_planner.model.backbone import BackboneModel, EMBEDDING_STD
from rspec_planner.model.text import TextDecoder
from rspec_planner.model.window_vision import WindowVisionTower


class AutoVla(BackboneModel):
    """A target of one autoregressive stage; see `model.backbone`."""

    def __init__(self, cfg: AutoVlaConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.vision = WindowVisionTower(cfg.vision)
        self.text = TextDecoder(cfg.text)
        nn.init.normal_(self.text.embed_tokens.weight, std=EMBEDDING_STD)
