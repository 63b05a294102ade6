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
Write a checkpoint folder of the released layout with random weights.

It stands in for weights that are not at hand: the same file names, the same keys and shapes, the
same kinds of tensors, drawn where they are cheap and written shard by shard. What such a model
says is noise; only arithmetic, memory and time can be read from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
import math
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
import torch
from torch import Tensor
from tqdm import tqdm

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.action import FourierEncoder
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.upstream_config import FAMILIES
from rspec_planner.model.upstream_folder import INDEX_NAME
from rspec_planner.model.upstream_keys import key_table

#: spread of weights against the inverse root of their inputs, about that of PyTorch's linear
#: layers (0.58): 36 layers then add to what they read and do not drown it
SPREAD = 0.5
EMBEDDING_STD = 1.0
BIAS_STD = 0.05
#: shards of the released folders
SHARDS = 5


def upstream_config(profile: ProfileConfig, model_type: str) -> dict[str, Any]:
    """Return the config.json of a profile, spelt as released; shapes lie in `vlm_config`."""
    family = FAMILIES.get(model_type)
    if family is None or family.layout != 'flat':
        raise ConfigurationError(f'model_type {model_type!r}: alpamayo_r1 and alpamayo1_5 can be '
                                 'written')
    text, tokens, expert = profile.text, profile.tokens, profile.expert
    first = tokens.traj_token_start
    bins = tokens.forbidden_end - first
    package = f'{model_type}.models'
    return {
        'architectures': ['AlpamayoR1' if model_type == 'alpamayo_r1' else 'Alpamayo1_5'],
        'model_type': model_type, 'dtype': 'bfloat16', 'vlm_backend': 'qwenvl3',
        'vlm_name_or_path': 'Qwen/Qwen3-VL-8B-Instruct', 'attn_implementation': 'sdpa',
        'vlm_config': _backbone(profile), 'vocab_size': text.vocab_size,
        'traj_vocab_size': bins, 'traj_token_start_idx': first,
        'traj_token_ids': {
            'history': tokens.traj_history, 'future': first + bins + 16,
            'history_start': tokens.traj_history_start,
            'future_start': tokens.traj_future_start, 'history_end': tokens.traj_history_end,
            'future_end': first + bins + 14},
        'tokens_per_history_traj': 3 * profile.history.num_poses, 'tokens_per_future_traj': 128,
        'min_pixels': profile.cameras.min_pixels, 'max_pixels': profile.cameras.max_pixels,
        'add_special_tokens': True, 'expert_non_causal_attention': True, 'keep_same_dtype': True,
        'expert_cfg': {'dtype': 'bfloat16', 'head_dim': text.head_dim,
                       'hidden_size': expert.hidden_size,
                       'intermediate_size': expert.intermediate_size,
                       'num_attention_heads': expert.num_heads},
        'action_in_proj_cfg': {
            '_target_': f'{package}.action_in_proj.PerWaypointActionInProjV2',
            'hidden_size': expert.in_proj_hidden_size, 'max_freq': expert.max_freq,
            'num_enc_layers': expert.in_proj_layers,
            'num_fourier_feats': expert.num_fourier_feats},
        'action_out_proj_cfg': {'_target_': 'torch.nn.Linear'},
        'action_space_cfg': _action_space(profile, model_type),
        'diffusion_cfg': {'_target_': f'{model_type}.diffusion.flow_matching.FlowMatching',
                          'int_method': 'euler', 'x_dims': '???',
                          'num_inference_steps': profile.flow.num_steps},
        'hist_traj_tokenizer_cfg': {
            '_target_': f'{package}.delta_tokenizer.DeltaTrajectoryTokenizer',
            'num_bins': profile.history.num_bins},
        'traj_tokenizer_cfg': {
            '_target_': f'{package}.action_tokenizer.DiscreteTrajectoryTokenizer',
            'num_bins': profile.history.first_bin_offset},
        **({} if model_type == 'alpamayo_r1' else {
            'include_camera_ids': True, 'include_frame_nums': True})}


def _backbone(profile: ProfileConfig) -> dict[str, Any]:
    """Return the backbone's shapes, spelt as in a Qwen3-VL config.json."""
    text, vision, tokens = profile.text, profile.vision, profile.tokens
    return {
        'model_type': 'qwen3_vl', 'image_token_id': tokens.image_pad,
        'vision_start_token_id': tokens.vision_start, 'vision_end_token_id': tokens.vision_end,
        'text_config': {
            'bos_token_id': tokens.pad, 'vocab_size': text.vocab_size,
            'hidden_size': text.hidden_size, 'num_hidden_layers': text.num_layers,
            'num_attention_heads': text.num_heads, 'num_key_value_heads': text.num_kv_heads,
            'head_dim': text.head_dim, 'intermediate_size': text.intermediate_size,
            'rms_norm_eps': text.rms_norm_eps, 'rope_theta': text.rope_theta,
            'attention_bias': False, 'rope_scaling': {
                'mrope_interleaved': True, 'mrope_section': list(text.mrope_section),
                'rope_type': 'default'}},
        'vision_config': {
            'depth': vision.depth, 'hidden_size': vision.hidden_size,
            'num_heads': vision.num_heads, 'intermediate_size': vision.intermediate_size,
            'deepstack_visual_indexes': list(vision.deepstack_layers),
            'out_hidden_size': vision.out_hidden_size, 'patch_size': vision.patch_size,
            'temporal_patch_size': vision.temporal_patch_size,
            'spatial_merge_size': vision.spatial_merge_size,
            'num_position_embeddings': vision.num_position_embeddings,
            'in_channels': vision.in_channels}}


def _action_space(profile: ProfileConfig, model_type: str) -> dict[str, Any]:
    space = profile.action_space
    named = ('n_waypoints', 'dt', 'accel_mean', 'accel_std', 'curvature_mean', 'curvature_std',
             'v_lambda', 'v_ridge', 'theta_lambda', 'theta_ridge', 'a_lambda', 'a_ridge',
             'kappa_lambda', 'kappa_ridge')
    return {'_target_': f'{model_type}.action_space.UnicycleAccelCurvatureActionSpace',
            **{name: getattr(space, name) for name in named},
            'accel_bounds': list(space.accel_bounds),
            'curvature_bounds': list(space.curvature_bounds)}


def random_tensors(profile: ProfileConfig, model_type: str, device: torch.device,
                   dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield released names and random weights, one at a time, and R1's buffers at the end."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, (_, shape) in key_table(profile, FAMILIES[model_type].layout).items():
        yield name, _draw(name, shape, device, dtype, generator)
    if model_type == 'alpamayo_r1':
        yield from _buffers(profile, device, dtype)


def _draw(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype,
          generator: torch.Generator) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if 'norm' in name and name.endswith('weight') or '.trunk.' in name and len(shape) == 1 \
            and name.endswith('weight'):
        return tensor.uniform_(0.75, 1.25, generator=generator)
    if name.endswith('bias'):
        return tensor.normal_(std=BIAS_STD, generator=generator)
    if name.endswith(('embed_tokens.weight', 'pos_embed.weight')):
        return tensor.normal_(std=EMBEDDING_STD, generator=generator)
    inputs = tensor[0].numel()
    return tensor.normal_(std=SPREAD * inputs ** -0.5, generator=generator)


def _buffers(profile: ProfileConfig, device: torch.device, dtype: torch.dtype
             ) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that R1 keeps in its file, as rounded as its weights."""
    expert, space = profile.expert, profile.action_space
    freqs = FourierEncoder(expert.num_fourier_feats, expert.max_freq).freqs.to(device, dtype)
    for name in ('sinus.0', 'sinus.1', 'timestep_fourier_encoder'):
        yield f'action_in_proj.{name}.freqs', freqs.clone()
    for name in ('accel_mean', 'accel_std', 'curvature_mean', 'curvature_std'):
        yield f'action_space.{name}', torch.tensor(getattr(space, name), dtype=dtype,
                                                   device=device)


def write_checkpoint(folder: str | Path, profile: ProfileConfig,
                     model_type: str = 'alpamayo_r1', *, device: torch.device | str = 'cpu',
                     dtype: torch.dtype = torch.bfloat16, shards: int = SHARDS,
                     seed: int = 0) -> int:
    """
    Write config, index and shards; return the bytes of the shards.

    Weights are drawn on `device`; at most one shard is held at a time.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    config = upstream_config(profile, model_type)
    (place / 'config.json').write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    table = key_table(profile, 'flat')
    total = dtype.itemsize * sum(math.prod(shape) for _, shape in table.values())
    limit = -(-total // shards)
    held: dict[str, Tensor] = {}
    mapped: dict[str, str] = {}
    number = written = 0
    drawn = random_tensors(profile, model_type, torch.device(device), dtype, seed)
    for name, tensor in tqdm(drawn, total=len(table), disable=None, leave=False,
                             desc=f'writing {place.name}'):
        size = sum(each.nbytes for each in held.values())
        if held and size + tensor.nbytes > limit and number < shards - 1:
            number += 1
            written += _write_shard(place, number, shards, held, mapped)
            held = {}
        held[name] = tensor
    written += _write_shard(place, number + 1, shards, held, mapped)
    if number + 1 < shards:
        raise ConfigurationError(f'{shards} shards: the weights fill {number + 1}; ask for fewer')
    (place / INDEX_NAME).write_text(json.dumps(
        {'metadata': {'total_size': written}, 'weight_map': mapped}, indent=1), encoding='utf-8')
    return written


def _write_shard(folder: Path, number: int, shards: int, held: Mapping[str, Tensor],
                 mapped: dict[str, str]) -> int:
    name = f'model-{number:05d}-of-{shards:05d}.safetensors'
    save_file({key: value.cpu() for key, value in held.items()}, folder / name,
              metadata={'format': 'pt'})
    mapped.update(dict.fromkeys(held, name))
    return sum(value.nbytes for value in held.values())
