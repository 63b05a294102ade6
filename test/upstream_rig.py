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
"""Small checkpoints of the released layout, by our writer and by transformers' own modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
import json
import math
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
import torch
from torch import nn, Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from rspec_planner.evaluate.synthetic_checkpoint import upstream_config
from rspec_planner.model.config import (
    CameraConfig,
    ExpertConfig,
    HistoryConfig,
    ProfileConfig,
    PromptConfig,
    TextConfig,
    TokenIds,
    VisionConfig,
)
from rspec_planner.model.upstream_folder import INDEX_NAME
from rspec_planner.model.upstream_keys import key_table

#: a vocabulary in the released order: words, Qwen's own special tokens, bins, the others
WORDS, FUTURE_BINS, HISTORY_BINS = 30, 30, 10


def token_ids(first: int = WORDS + 6, bins: int = FUTURE_BINS + HISTORY_BINS,
              qwen: int = WORDS) -> TokenIds:
    """Return ids in the order of the released tokenizer; qwen: the id of <|endoftext|>."""
    behind = first + bins
    return TokenIds(pad=qwen, im_start=qwen + 1, im_end=qwen + 2, vision_start=qwen + 3,
                    vision_end=qwen + 4, image_pad=qwen + 5, cot_start=behind + 8,
                    cot_end=behind + 9, traj_history_start=behind + 5,
                    traj_history=behind + 15, traj_history_end=behind + 7,
                    traj_future_start=behind + 12, traj_token_start=first,
                    forbidden_start=first, forbidden_end=behind)


def upstream_profile() -> ProfileConfig:
    """Every width differs, three DeepStack taps, expert width not heads times head_dim."""
    text = TextConfig(vocab_size=112, hidden_size=64, num_layers=4, num_heads=6,
                      num_kv_heads=2, head_dim=24, intermediate_size=112,
                      mrope_section=(5, 4, 3), rope_theta=5000.0)
    vision = VisionConfig(hidden_size=48, depth=5, num_heads=4, intermediate_size=88,
                          deepstack_layers=(0, 2, 3), out_hidden_size=64,
                          num_position_embeddings=49)
    expert = ExpertConfig(hidden_size=40, num_heads=4, intermediate_size=72,
                          in_proj_hidden_size=32)
    return ProfileConfig(
        name='alpamayo-r1', vision=vision, text=text, expert=expert, tokens=token_ids(),
        history=HistoryConfig(num_bins=HISTORY_BINS, first_bin_offset=FUTURE_BINS),
        cameras=CameraConfig(height=64, width=96, resize='bicubic', min_pixels=4096,
                             max_pixels=6144 + 2048),
        prompt=PromptConfig('chat', navigation=False), max_reasoning_tokens=256)


ROWS, FIRST, BINS, QWEN = 155_697, 151_669, 4_000, 151_643
VISION_START, VISION_END, IMAGE_PAD = 151_652, 151_653, 151_655


def released_profile(name: str = 'alpamayo-r1') -> ProfileConfig:
    """Return rows and ids of the released checkpoints at a width that fits a test."""
    small = upstream_profile()
    tokens = replace(token_ids(FIRST, BINS, QWEN), vision_start=VISION_START,
                     vision_end=VISION_END, image_pad=IMAGE_PAD)
    text = replace(small.text, vocab_size=ROWS, hidden_size=32, num_layers=3,
                   intermediate_size=48)
    return replace(small, name=name, tokens=tokens, text=text,
                   vision=replace(small.vision, out_hidden_size=32, deepstack_layers=(0, 2)),
                   history=replace(small.history, num_bins=1000, first_bin_offset=3000))


class Projection(nn.Module):
    """The action expert's input projection, as the specification words it, with its keys."""

    def __init__(self, hidden: int, inner: int, feats: int = 20) -> None:
        super().__init__()
        trunk: list[nn.Module] = [nn.Linear(3 * feats, inner), nn.SiLU(), nn.RMSNorm(inner, 1e-5),
                                  nn.Linear(inner, inner), nn.SiLU(), nn.RMSNorm(inner, 1e-5),
                                  nn.Linear(inner, hidden)]
        self.encoder = nn.ModuleDict({'trunk': nn.Sequential(*trunk)})
        self.norm = nn.LayerNorm(hidden, eps=1e-5)
        # upstream builds its modules under a bf16 default dtype, which rounds these
        self.freqs = torch.logspace(0, 2, feats // 2).bfloat16().float()

    def forward(self, noisy: Tensor, t: Tensor) -> Tensor:
        """Return (B, 64, hidden) of actions (B, 64, 2) and times (B,)."""
        def features(scalar: Tensor) -> Tensor:
            phase = scalar[..., None] * self.freqs * 2 * math.pi  # rounds in this order
            return math.sqrt(2) * torch.cat((phase.sin(), phase.cos()), -1)

        time = t[:, None].expand(-1, noisy.shape[1])
        joined = torch.cat([features(x) for x in (*noisy.unbind(-1), time)], -1)
        return self.norm(self.encoder['trunk'](joined))


@dataclass
class Upstream:
    """The released model's parts: transformers' Qwen3-VL and the expert around it."""

    vlm: Qwen3VLForConditionalGeneration
    expert: Qwen3VLTextModel
    action_in_proj: Projection
    action_out_proj: nn.Linear
    profile: ProfileConfig

    def parts(self) -> dict[str, nn.Module]:
        """Return prefix -> module as the released class names them."""
        return {'vlm': self.vlm, 'expert': self.expert, 'action_in_proj': self.action_in_proj,
                'action_out_proj': self.action_out_proj}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that R1 stores and 1.5 does not."""
        freqs, space = self.action_in_proj.freqs[None], self.profile.action_space
        named = ('sinus.0', 'sinus.1', 'timestep_fourier_encoder')
        scalars = ('accel_mean', 'accel_std', 'curvature_mean', 'curvature_std')
        return {**{f'action_in_proj.{name}.freqs': freqs.clone() for name in named},
                **{f'action_space.{n}': torch.tensor(getattr(space, n)) for n in scalars}}

    def state(self) -> dict[str, Tensor]:
        """Return the weights of the released class."""
        found = {f'{prefix}.{name}': weight for prefix, module in self.parts().items()
                 for name, weight in module.state_dict().items()}
        return {name: w for name, w in found.items() if name != 'expert.embed_tokens.weight'}

    @torch.no_grad()
    def velocity(self, noisy: Tensor, t: Tensor, cache: Any, rope_delta: int) -> Tensor:
        """Return (1, 64, 2) behind a cache, which is cropped back."""
        length, rows = cache.get_seq_length(), noisy.shape[1]
        mask = torch.zeros((1, 1, rows, length + rows))
        positions = (torch.arange(rows) + length + rope_delta).expand(3, 1, -1)
        out = self.expert(inputs_embeds=self.action_in_proj(noisy, t), position_ids=positions,
                          attention_mask=mask, past_key_values=cache, use_cache=True)
        cache.crop(-rows)
        return self.action_out_proj(out.last_hidden_state)


def qwen_config(config: dict[str, Any]) -> Qwen3VLConfig:
    """Return transformers' config of a written config.json, made without our reader."""
    backbone = json.loads(json.dumps(config['vlm_config']))
    backbone['text_config']['vocab_size'] = config['vocab_size']
    text = backbone['text_config']
    text['rope_parameters'] = {**text.pop('rope_scaling'), 'rope_theta': text.pop('rope_theta')}
    made = Qwen3VLConfig(**backbone, tie_word_embeddings=False)
    made.text_config.eos_token_id = made.text_config.bos_token_id = None
    return made


def make_upstream(profile: ProfileConfig, config: dict[str, Any], seed: int = 0) -> Upstream:
    """Return the released model's modules with weights large enough that every path shows."""
    torch.manual_seed(seed)
    whole, narrow = qwen_config(config), qwen_config(config)
    text, given = narrow.text_config, config['expert_cfg']
    text.vocab_size = 8
    for name in ('hidden_size', 'intermediate_size', 'num_attention_heads', 'head_dim'):
        setattr(text, name, given[name])
    for part in (whole.text_config, whole.vision_config, text):
        part._attn_implementation = 'sdpa'
    made = Upstream(
        Qwen3VLForConditionalGeneration(whole).eval(), Qwen3VLTextModel(text).eval(),
        Projection(given['hidden_size'], config['action_in_proj_cfg']['hidden_size']),
        nn.Linear(given['hidden_size'], 2), profile)
    for part in made.parts().values():
        for name, weight in part.named_parameters():
            _draw(name, weight)
    return made


@torch.no_grad()
def _draw(name: str, weight: Tensor) -> None:
    if weight.dim() == 1 and name.endswith('weight'):
        weight.uniform_(0.5, 1.5)
    elif name.endswith('bias'):
        weight.normal_(std=0.2)
    elif 'embed' in name and 'proj' not in name:
        weight.normal_()
    else:
        weight.normal_(std=weight[0].numel() ** -0.5)


def save_folder(folder: Path, state: dict[str, Tensor], config: dict[str, Any],
                shards: int = 3) -> Path:
    """Write tensors and config in the released layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config))
    names, mapped = sorted(state), {}
    for number in range(shards):
        file = f'model-{number + 1:05d}-of-{shards:05d}.safetensors'
        held = {name: state[name].contiguous() for name in names[number::shards]}
        save_file(held, folder / file)
        mapped.update(dict.fromkeys(held, file))
    (folder / INDEX_NAME).write_text(json.dumps({'weight_map': mapped}))
    return folder


def hollow_folder(folder: Path, profile: ProfileConfig, config: dict[str, Any],
                  shards: int = 5) -> Path:
    """Write a folder of any size whose headers are true and whose weights are holes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config))
    table, mapped = key_table(profile, 'flat'), {}
    for number in range(shards):
        file, end, header = f'model-{number + 1:05d}-of-{shards:05d}.safetensors', 0, {}
        for name in list(table)[number::shards]:
            start, end = end, end + 2 * math.prod(table[name][1])
            header[name] = {'dtype': 'BF16', 'shape': list(table[name][1]),
                            'data_offsets': [start, end]}
        raw = json.dumps(header).encode()
        with (folder / file).open('wb') as out:
            out.write(len(raw).to_bytes(8, 'little') + raw)
            out.truncate(8 + len(raw) + end)
        mapped.update(dict.fromkeys(header, file))
    (folder / INDEX_NAME).write_text(json.dumps({'weight_map': mapped}))
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    """Set top-level fields of a folder's config; None removes one."""
    path = folder / 'config.json'
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_shard(folder: Path, change: Any, number: int = 0) -> str:
    """Let `change` edit the tensors of one shard, keep the index true; return the file's name."""
    path = sorted(folder.glob('*.safetensors'))[number]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    index = json.loads((folder / INDEX_NAME).read_text())
    kept = {k: v for k, v in index['weight_map'].items() if v != path.name}
    index['weight_map'] = {**kept, **dict.fromkeys(tensors, path.name)}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return path.name


def written_config(profile: ProfileConfig | None = None, model_type: str = 'alpamayo_r1'
                   ) -> dict[str, Any]:
    """Return a config.json of the small profile."""
    return upstream_config(profile or upstream_profile(), model_type)


def pad_images(count: int, profile: ProfileConfig) -> Tensor:
    """Return noise images (count, H, W, 3) uint8."""
    cameras = profile.cameras
    return torch.randint(0, 256, (count, cameras.height, cameras.width, 3), dtype=torch.uint8)


