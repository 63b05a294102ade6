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
The target: vision tower, text decoder and action expert of one profile.

State-dict prefixes against a released checkpoint: `vision.` is `vlm.model.visual.`, `text.` is
`vlm.model.language_model.` (but `text.lm_head.` is `vlm.lm_head.`), `expert.` is `expert.`
(but `expert.action_in_proj.` and `expert.action_out_proj.` have no prefix there).
"""

from __future__ import annotations

from torch import nn

from rspec_planner.model.action import ActionExpert
from rspec_planner.model.backbone import BackboneModel, EMBEDDING_STD
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.text import TextDecoder
from rspec_planner.model.vision import VisionTower


class Target(BackboneModel):
    """The unmodified vision-language-action model; it alone decides what is said."""

    def __init__(self, cfg: ProfileConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.vision = VisionTower(cfg.vision)
        self.text = TextDecoder(cfg.text)
        self.expert = ActionExpert(cfg)
        for table in (self.text.embed_tokens, self.vision.pos_embed):
            nn.init.normal_(table.weight, std=EMBEDDING_STD)
