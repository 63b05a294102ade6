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
Shapes and ids of a profile; one code path serves every size.

Numbers of `alpamayo_r1()` follow the released config.json of nvidia/Alpamayo-R1-10B and the
Qwen3-VL-8B text and vision configs; `tiny()` keeps every structural rule at laptop size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rspec_planner.errors import ConfigurationError


@dataclass(frozen=True)
class VisionConfig:
    """Vision tower: patch embedding, full attention within one image, 2x2 merge, DeepStack."""

    hidden_size: int
    depth: int
    num_heads: int
    intermediate_size: int
    deepstack_layers: tuple[int, ...]  # blocks whose output is also merged and injected
    out_hidden_size: int
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304  # a square grid, resampled bilinearly
    in_channels: int = 3


@dataclass(frozen=True)
class TextConfig:
    """
    Decoder of the target: GQA, SwiGLU, three-axis rotary.

    The defaults of the last four are Qwen3-VL's; Qwen2.5-VL is the opposite in each.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    mrope_section: tuple[int, int, int]
    rope_theta: float = 5_000_000.0
    rms_norm_eps: float = 1e-6
    mrope_interleaved: bool = True  # axes take turns along the frequencies, or lie in sections
    qk_norm: bool = True  # RMSNorm on each query and key head
    qkv_bias: bool = False
    tied_head: bool = False  # the head is the embedding table


@dataclass(frozen=True)
class ExpertConfig:
    """Action expert; layers, KV heads, head_dim and rotary are those of the text decoder."""

    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_proj_hidden_size: int = 512
    in_proj_layers: int = 2
    num_fourier_feats: int = 20
    max_freq: float = 100.0


@dataclass(frozen=True)
class ActionSpaceConfig:
    """Unicycle action space in normalised acceleration and curvature."""

    n_waypoints: int = 64
    dt: float = 0.1
    accel_mean: float = 0.02902694707164455
    accel_std: float = 0.6810426736454882
    curvature_mean: float = 0.0002692167976330542
    curvature_std: float = 0.026148280660833106
    accel_bounds: tuple[float, float] = (-9.8, 9.8)
    curvature_bounds: tuple[float, float] = (-0.33, 0.33)
    v_lambda: float = 1e-6
    v_ridge: float = 1e-4
    theta_lambda: float = 1e-6
    theta_ridge: float = 1e-8
    a_lambda: float = 1e-4
    a_ridge: float = 1e-4
    kappa_lambda: float = 1e-4
    kappa_ridge: float = 1e-4


@dataclass(frozen=True)
class HistoryConfig:
    """Delta tokeniser of the ego history: 16 poses, three axes, 48 tokens."""

    num_poses: int = 16
    num_bins: int = 1000
    delta_min: tuple[float, float, float] = (-4.0, -4.0, -10.0)
    delta_max: tuple[float, float, float] = (4.0, 4.0, 10.0)
    first_bin_offset: int = 3000  # <i3000> is the first history bin


@dataclass(frozen=True)
class FlowConfig:
    """Flow matching: t = 0 is noise, t = 1 is data."""

    num_steps: int = 10
    noise_scale: float = 1.0  # of the first sample, see `flow.start_noise`


@dataclass(frozen=True)
class CautionConfig:
    """
    When a plan is driven more slowly because the target is unsure of its words.

    The thresholds are the checkpoint's own, chosen on its validation split: a mean confidence
    (`decode.confidence`) of the plans of the last `window_s` below `enter_below` begins it, one
    above `leave_above` ends it.
    """

    enter_below: float
    leave_above: float
    window_s: float = 1.2
    min_plans: int = 4  # in the window; a planner slower than that is never called unsure
    deceleration: float = 1.5  # m/s^2, at least, while it lasts

    def __post_init__(self) -> None:
        if not 0.0 < self.enter_below <= self.leave_above < 1.0:
            raise ConfigurationError(f'caution enter_below {self.enter_below:g}, leave_above '
                                     f'{self.leave_above:g}: choose 0 < enter <= leave < 1')
        if not (self.window_s > 0.0 and self.min_plans >= 1 and 0.0 < self.deceleration <= 8.0):
            raise ConfigurationError(
                f'caution window_s {self.window_s:g}, min_plans {self.min_plans}, deceleration '
                f'{self.deceleration:g}: choose a window above 0 s, one plan at least and 0 to 8 '
                'm/s^2')


@dataclass(frozen=True)
class TokenIds:
    """Ids that the code needs by name; read from config.json, never written as literals."""

    pad: int
    image_pad: int
    vision_start: int
    vision_end: int
    im_start: int
    im_end: int
    cot_start: int
    cot_end: int
    traj_history_start: int
    traj_history: int
    traj_history_end: int
    traj_future_start: int
    traj_token_start: int  # id of <i0>; may be virtual when the profile has only history bins
    forbidden_start: int  # ids [forbidden_start, forbidden_end) never appear in a CoC
    forbidden_end: int

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end the reasoning."""
        return (self.traj_future_start, self.im_end)


@dataclass(frozen=True)
class CameraConfig:
    """Cameras in prompt order, their dataset index and the size the model sees."""

    names: tuple[str, ...] = ('cross_left', 'front_wide', 'cross_right', 'front_tele')
    ids: tuple[int, ...] = (0, 1, 2, 6)
    frames: int = 4
    height: int = 192
    width: int = 384
    anchor: str = 'front_wide'
    resize: str = 'area'  # 'area': pixel areas averaged; 'bicubic': as Qwen3-VL's processor
    min_pixels: int = 163_840  # of 'bicubic': the size that a frame of any size is brought to,
    max_pixels: int = 196_608  # see image_size.smart_size

    @property
    def decode_size(self) -> tuple[int, int] | None:
        """
        Return the rows and columns below which a decoder must not shrink, None to keep all.

        A JPEG decoded at a half and resized is close to, but not, what 'bicubic' gives.
        """
        return (self.height, self.width) if self.resize == 'area' else None


@dataclass(frozen=True)
class PromptConfig:
    """What a prompt holds beside images, history and instruction."""

    style: str = 'words'  # 'words': lower-case words; 'chat': Qwen's chat format, byte for byte
    camera_names: bool = False  # chat: '{name}: ' before the first image of a camera
    frame_numbers: bool = False  # chat: 'frame {k} ' before every image
    navigation: bool = True  # whether the weights know the route block


@dataclass(frozen=True)
class ProfileConfig:
    """Everything that fixes a target."""

    name: str
    vision: VisionConfig
    text: TextConfig
    expert: ExpertConfig
    tokens: TokenIds
    action_space: ActionSpaceConfig = field(default_factory=ActionSpaceConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    cameras: CameraConfig = field(default_factory=CameraConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    max_reasoning_tokens: int = 64
    caution: CautionConfig | None = None  # None: its confidence means nothing that is known

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Return patch rows and columns of one image."""
        return (self.cameras.height // self.vision.patch_size,
                self.cameras.width // self.vision.patch_size)

    @property
    def num_images(self) -> int:
        """Return how many images a prompt holds."""
        return len(self.cameras.names) * self.cameras.frames

    @property
    def tokens_per_image(self) -> int:
        """Return merged visual tokens of one image."""
        rows, cols = self.patch_grid
        return rows * cols // self.vision.spatial_merge_size ** 2

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ProfileConfig:
        """Build a profile from `to_dict` output (lists become tuples)."""
        def build(cls: Any, values: dict[str, Any]) -> Any:
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        parts = {'vision': VisionConfig, 'text': TextConfig, 'expert': ExpertConfig,
                 'tokens': TokenIds, 'action_space': ActionSpaceConfig,
                 'history': HistoryConfig, 'flow': FlowConfig, 'cameras': CameraConfig,
                 'prompt': PromptConfig, 'caution': CautionConfig}
        return ProfileConfig(**{k: build(parts[k], v) if k in parts and v is not None else v
                                for k, v in data.items()})


def tiny(tokens: TokenIds, vocab_size: int) -> ProfileConfig:
    """
    Return the embedded profile: about 5.6 M parameters, 1,152 visual tokens of about 1,270.

    Sizes are chosen for a whole frame below 150 ms on two CPU cores; docs/results.md has what
    was measured. A fourth decoder layer costs a quarter of the prefill, whose time follows the
    number of layers before the last, and bought no decision that three layers miss.
    Four flow steps are no worse than ten for the one published sample: its minADE on 64 clips
    was 0.202 m with ten steps, 0.191 with five, 0.187 with four and 0.188 with three; that of
    the best of six samples rises slowly (0.073, 0.073, 0.077, 0.081 m).
    """
    text = TextConfig(vocab_size=vocab_size, hidden_size=256, num_layers=3, num_heads=4,
                      num_kv_heads=2, head_dim=32, intermediate_size=640,
                      mrope_section=(6, 5, 5), rope_theta=10_000.0)
    vision = VisionConfig(hidden_size=128, depth=5, num_heads=4, intermediate_size=512,
                          deepstack_layers=(1, 3), out_hidden_size=text.hidden_size,
                          num_position_embeddings=576)
    expert = ExpertConfig(hidden_size=160, num_heads=4, intermediate_size=384,
                          in_proj_hidden_size=128)
    return ProfileConfig(name='tiny', vision=vision, text=text, expert=expert, tokens=tokens,
                         flow=FlowConfig(num_steps=4))


def alpamayo_r1() -> ProfileConfig:
    """Return the shapes and ids of nvidia/Alpamayo-R1-10B (11,078,526,194 parameters)."""
    text = TextConfig(vocab_size=155_697, hidden_size=4096, num_layers=36, num_heads=32,
                      num_kv_heads=8, head_dim=128, intermediate_size=12_288,
                      mrope_section=(24, 20, 20))
    vision = VisionConfig(hidden_size=1152, depth=27, num_heads=16, intermediate_size=4304,
                          deepstack_layers=(8, 16, 24), out_hidden_size=4096)
    expert = ExpertConfig(hidden_size=2048, num_heads=16, intermediate_size=8256)
    tokens = TokenIds(pad=151_643, image_pad=151_655, vision_start=151_652, vision_end=151_653,
                      im_start=151_644, im_end=151_645, cot_start=155_677, cot_end=155_678,
                      traj_history_start=155_674, traj_history=155_684,
                      traj_history_end=155_676, traj_future_start=155_681,
                      traj_token_start=151_669, forbidden_start=151_669,
                      forbidden_end=155_669)
    return ProfileConfig(name='alpamayo-r1', vision=vision, text=text, expert=expert,
                         tokens=tokens, prompt=PromptConfig('chat', navigation=False),
                         cameras=CameraConfig(height=320, width=576, resize='bicubic'),
                         max_reasoning_tokens=256)


def alpamayo_1_5() -> ProfileConfig:
    """
    Return the shapes and ids of nvidia/Alpamayo-1.5-10B.

    They are those of R1; the prompt names cameras and frames and may hold a route.
    """
    return replace(alpamayo_r1(), name='alpamayo-1.5',
                   prompt=PromptConfig('chat', camera_names=True, frame_numbers=True))
