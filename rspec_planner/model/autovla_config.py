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
Shapes and ids of AutoVLA (arXiv 2506.13757), a target that says its trajectory.

The backbone is Qwen2.5-VL-3B (arXiv 2502.13923, released config.json). The model reasons in
words and ends with tokens of a codebook of motions, 0.5 s each, so one autoregressive decoding
yields reasoning and path. Ids, horizon and video sizes follow the configuration files of the
public code of AutoVLA (config/training/qwen2.5-vl-3B-*.yaml, models/action_tokenizer.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.config import TextConfig


@dataclass(frozen=True)
class WindowVisionConfig:
    """Vision tower: attention in windows but for a few blocks, axial rotary, no DeepStack."""

    hidden_size: int
    depth: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    full_attention_layers: tuple[int, ...]  # blocks whose patches see their whole frame
    window_size: int = 112  # pixels
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    tokens_per_second: int = 2  # of the temporal axis of the rotary

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Return no layers: this tower injects nothing inside the decoder."""
        return ()


@dataclass(frozen=True)
class AutoVlaTokens:
    """Ids that the code needs by name."""

    pad: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    video_pad: int
    action_start: int  # id of <action_0>
    num_actions: int

    @property
    def image_pad(self) -> int:
        """Return the id of the slots that visual features fill, those of videos."""
        return self.video_pad

    @property
    def action_end(self) -> int:
        """Return the first id behind the actions."""
        return self.action_start + self.num_actions

    @property
    def forbidden_start(self) -> int:
        """Return the end of the vocabulary: nothing is forbidden."""
        return self.action_end

    @property
    def forbidden_end(self) -> int:
        """Return the end of the vocabulary."""
        return self.action_end

    @property
    def cot_end(self) -> int:
        """Return no id: there is no token behind which one other always follows."""
        return -1

    @property
    def traj_future_start(self) -> int:
        """Return no id, see `cot_end`."""
        return -1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer, those of Qwen2.5-VL's generation config."""
        return (self.im_end, self.pad)


@dataclass(frozen=True)
class VideoConfig:
    """The cameras' videos in prompt order, and the size the model sees."""

    names: tuple[str, ...] = ('front', 'front_left', 'front_right')
    frames: int = 4
    interval_s: float = 0.5
    height: int = 224
    width: int = 420


@dataclass(frozen=True)
class AutoVlaConfig:
    """Everything that fixes an AutoVLA target."""

    name: str
    vision: WindowVisionConfig
    text: TextConfig
    tokens: AutoVlaTokens
    video: VideoConfig = field(default_factory=VideoConfig)
    horizon_actions: int = 10  # tokens of one trajectory
    action_s: float = 0.5  # duration of one of them
    max_answer_tokens: int = 512

    def __post_init__(self) -> None:
        """Raise ConfigurationError for the first value that cannot be."""
        vision, video = self.vision, self.video
        unit = vision.patch_size * vision.spatial_merge_size
        for name in ('height', 'width'):
            if getattr(video, name) % unit:
                raise ConfigurationError(f'video {name} {getattr(video, name)}: use a multiple '
                                         f'of {unit}')
        if video.frames % vision.temporal_patch_size:
            raise ConfigurationError(f'{video.frames} video frames: use a multiple of '
                                     f'{vision.temporal_patch_size}')
        if self.tokens.action_end != self.text.vocab_size:
            raise ConfigurationError(f'action tokens end at {self.tokens.action_end}, the '
                                     f'vocabulary at {self.text.vocab_size}: they must be its '
                                     'last rows')
        if (self.slots - 1) * self.time_step >= max(self.merged_grid):
            # behind such a video the published versions of the position rule part
            raise ConfigurationError(f'{video.frames} video frames of {self.merged_grid} tokens: '
                                     'the video is longer than its frames are wide')

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Return patch rows and columns of one frame."""
        return (self.video.height // self.vision.patch_size,
                self.video.width // self.vision.patch_size)

    @property
    def merged_grid(self) -> tuple[int, int]:
        """Return rows and columns of the visual tokens of one pair of frames."""
        rows, cols = self.patch_grid
        return rows // self.vision.spatial_merge_size, cols // self.vision.spatial_merge_size

    @property
    def tokens_per_image(self) -> int:
        """Return the visual tokens of one pair of frames."""
        rows, cols = self.merged_grid
        return rows * cols

    @property
    def slots(self) -> int:
        """Return how many pairs of frames one video has."""
        return self.video.frames // self.vision.temporal_patch_size

    @property
    def num_images(self) -> int:
        """Return how many pairs of frames a prompt holds."""
        return len(self.video.names) * self.slots

    @property
    def time_step(self) -> int:
        """Return how far the temporal positions of neighbouring pairs lie apart."""
        seconds = self.video.interval_s * self.vision.temporal_patch_size
        return int(seconds * self.vision.tokens_per_second)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> AutoVlaConfig:
        """Build a configuration from `to_dict` output (lists become tuples)."""
        parts = {'vision': WindowVisionConfig, 'text': TextConfig, 'tokens': AutoVlaTokens,
                 'video': VideoConfig}

        def build(cls: Any, values: dict[str, Any]) -> Any:
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        try:
            return AutoVlaConfig(**{key: build(parts[key], value) if key in parts else value
                                    for key, value in data.items()})
        except (TypeError, AttributeError) as error:
            raise ConfigurationError(f'not an AutoVLA configuration ({error}): write it with '
                                     'AutoVlaConfig.to_dict') from error


def autovla() -> AutoVlaConfig:
    """
    Return the shapes and ids of AutoVLA: Qwen2.5-VL-3B with 2,048 action tokens appended.

    The tokenizer has 151,665 entries, where <action_0> begins; the embedding is cut to the
    tokenizer's length and thus ends with the last action.
    """
    tokens = AutoVlaTokens(pad=151_643, im_start=151_644, im_end=151_645, vision_start=151_652,
                           vision_end=151_653, video_pad=151_656, action_start=151_665,
                           num_actions=2048)
    text = TextConfig(vocab_size=tokens.action_end, hidden_size=2048, num_layers=36,
                      num_heads=16, num_kv_heads=2, head_dim=128, intermediate_size=11_008,
                      mrope_section=(16, 24, 24), rope_theta=1_000_000.0,
                      mrope_interleaved=False, qk_norm=False, qkv_bias=True, tied_head=True)
    vision = WindowVisionConfig(hidden_size=1280, depth=32, num_heads=16, intermediate_size=3420,
                                out_hidden_size=2048, full_attention_layers=(7, 15, 23, 31))
    return AutoVlaConfig('autovla', vision, text, tokens)


def autovla_tiny(tokens: AutoVlaTokens) -> AutoVlaConfig:
    """Return a laptop size that keeps every structural rule; tokens: those of its tokenizer."""
    text = TextConfig(vocab_size=tokens.action_end, hidden_size=192, num_layers=3, num_heads=6,
                      num_kv_heads=2, head_dim=32, intermediate_size=512,
                      mrope_section=(4, 6, 6), rope_theta=10_000.0, mrope_interleaved=False,
                      qk_norm=False, qkv_bias=True, tied_head=True)
    vision = WindowVisionConfig(hidden_size=96, depth=4, num_heads=4, intermediate_size=256,
                                out_hidden_size=192, full_attention_layers=(1, 3),
                                window_size=56)
    return AutoVlaConfig('autovla-tiny', vision, text, tokens,
                         VideoConfig(height=112, width=196), max_answer_tokens=96)
