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
The config.json of a released Alpamayo checkpoint, mapped field by field to a profile.

R1 and 1.5 name their backbone (`vlm_name_or_path`) and say nothing of its shapes; those are the
public ones of Qwen3-VL. A smaller model of the same layout, and Alpamayo 2 Super, carry theirs
in `vlm_config`, spelt as in a Qwen3-VL config.json. Ids are read, never assumed; those that no
field names follow from the order in which the released tokenizer adds its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rspec_planner.errors import EngineError
from rspec_planner.model.config import (
    ActionSpaceConfig,
    CameraConfig,
    ExpertConfig,
    FlowConfig,
    HistoryConfig,
    ProfileConfig,
    PromptConfig,
    TextConfig,
    TokenIds,
    VisionConfig,
)
from rspec_planner.model.image_size import smart_size
from rspec_planner.model.upstream_fields import Fields, read_json

CONFIG_NAME = 'config.json'


@dataclass(frozen=True)
class Family:
    """One released `model_type`."""

    profile: str  # our name
    layout: str  # key table, see `upstream_keys`
    cameras: tuple[int, ...]  # dataset indices that it drives with
    plans: bool  # its prompt is known, so that a planner can run it
    rounds_frequencies: bool  # of its Fourier features, where the file holds none


FAMILIES = {
    'alpamayo_r1': Family('alpamayo-r1', 'flat', (0, 1, 2, 6), True, False),
    'alpamayo1_5': Family('alpamayo-1.5', 'flat', (0, 1, 2, 6), True, True),
    'alpamayo2_super': Family('alpamayo-2-super', 'nested', (0, 1, 2, 3, 5, 6), False, False),
}
CAMERA_NAMES = ('cross_left', 'front_wide', 'cross_right', 'rear_left', 'rear_tele',
                'rear_right', 'front_tele')

#: text fields of the public backbones, by the last component of `vlm_name_or_path`
_QWEN_8B: dict[str, Any] = {
    'hidden_size': 4096, 'num_hidden_layers': 36, 'num_attention_heads': 32,
    'num_key_value_heads': 8, 'head_dim': 128, 'intermediate_size': 12_288}
BACKBONES = {'Qwen3-VL-8B-Instruct': _QWEN_8B, 'Qwen3-VL-8B-Thinking': _QWEN_8B,
             'Cosmos-Reason2-8B': _QWEN_8B}
#: what all of them share, and what a `vlm_config` may leave out
_VISION = {'hidden_size': 1152, 'depth': 27, 'num_heads': 16, 'intermediate_size': 4304,
           'deepstack_visual_indexes': [8, 16, 24], 'patch_size': 16, 'temporal_patch_size': 2,
           'spatial_merge_size': 2, 'num_position_embeddings': 2304, 'in_channels': 3}
_ROPE = {'rope_theta': 5_000_000, 'mrope_section': [24, 20, 20]}
#: ids of the public Qwen3-VL tokenizer, where no `vlm_config` names others
_QWEN_IDS = {'image_token_id': 151_655, 'vision_start_token_id': 151_652,
             'vision_end_token_id': 151_653}
_QWEN_END_OF_TEXT = 151_643  # <|endoftext|>; <|im_start|> and <|im_end|> follow it

#: place of a special token behind the trajectory bins, in the order of the released tokenizer
_PLACE = {'history_start': 5, 'history_end': 7, 'cot_start': 8, 'cot_end': 9,
          'future_start': 12, 'future_end': 14, 'history': 15, 'future': 16}


@dataclass(frozen=True)
class UpstreamConfig:
    """What a released config.json says."""

    model_type: str
    family: Family
    profile: ProfileConfig


def read_upstream_config(folder: str | Path) -> UpstreamConfig:
    """Return the config of a checkpoint folder; EngineError names the first field at fault."""
    path = Path(folder) / CONFIG_NAME
    fields = Fields(read_json(path), f'{path}: ')
    kind = fields.text('model_type')
    family = FAMILIES.get(kind)
    if family is None:
        raise EngineError(f'{path}: model_type is {kind!r}; only {", ".join(FAMILIES)} are '
                          'known: give a folder of one of these models')
    _refuse(fields)
    nested = family.layout == 'nested'
    expert = fields.child('expert_config') if nested else fields
    text, vision = _backbone(fields)
    tokens, first_bin = _tokens(fields, nested, text.vocab_size)
    pixels = (fields.integer('min_pixels', 163_840), fields.integer('max_pixels', 196_608))
    profile = ProfileConfig(
        name=family.profile, vision=vision, text=text, tokens=tokens,
        expert=_expert(expert, expert.child('llm_config' if nested else 'expert_cfg'), text),
        action_space=_action_space(expert.child('action_space_cfg')),
        history=_history(fields, first_bin), flow=_flow(expert.optional('diffusion_cfg')),
        cameras=_cameras(family, vision, *pixels), prompt=_prompt(fields, kind),
        max_reasoning_tokens=256)
    return UpstreamConfig(kind, family, profile)


def _refuse(fields: Fields) -> None:
    """Raise for what changes the arithmetic and is not supported."""
    if fields.flag('tie_word_embeddings', False):
        raise fields.fail('tie_word_embeddings', 'is true, the head of these models is a tensor '
                          'of its own')
    if 'quantization_config' in fields:
        raise fields.fail('quantization_config', 'is present, quantised weights are not read; '
                          'give the bfloat16 checkpoint and choose a precision at load')
    if 'expert_non_causal_attention' in fields \
            and not fields.flag('expert_non_causal_attention', True):
        raise fields.fail('expert_non_causal_attention', 'is false, the expert here sees all of '
                          'its waypoints')


def _backbone(fields: Fields) -> tuple[TextConfig, VisionConfig]:
    """Return the shapes of text decoder and vision tower."""
    if 'vlm_config' in fields:
        inner = fields.child('vlm_config')
        text, vision = inner.child('text_config'), inner.optional('vision_config')
        # the outer vocabulary is the one that the tokenizer was extended to
        vocabulary = fields.integer('vocab_size', text.integer('vocab_size'))
    else:
        name = fields.text('vlm_name_or_path').rstrip('/').rsplit('/', 1)[-1]
        if name not in BACKBONES:
            raise fields.fail('vlm_name_or_path', f'names backbone {name!r}; known are '
                              f'{", ".join(BACKBONES)}, shapes of others go into vlm_config')
        text, vision = Fields(BACKBONES[name], f'backbone {name}: '), Fields({}, '')
        vocabulary = fields.integer('vocab_size')
    decoder = _text(text, vocabulary)
    return decoder, _vision(vision, decoder.hidden_size)


def _text(text: Fields, vocabulary: int) -> TextConfig:
    rope = text.optional('rope_scaling' if 'rope_scaling' in text else 'rope_parameters')
    section = rope.integers('mrope_section') if 'mrope_section' in rope \
        else tuple(_ROPE['mrope_section'])  # type: ignore[arg-type]
    theta = text.number('rope_theta', rope.number('rope_theta', float(str(_ROPE['rope_theta']))))
    head_dim = text.integer('head_dim')
    if len(section) != 3 or sum(section) * 2 != head_dim:
        raise rope.fail('mrope_section', f'is {list(section)}, three parts must sum to half of '
                        f'head_dim {head_dim}')
    heads, kv_heads = (text.integer(n) for n in ('num_attention_heads', 'num_key_value_heads'))
    if heads % kv_heads:
        raise text.fail('num_attention_heads', f'is {heads}, must be a multiple of '
                        f'num_key_value_heads {kv_heads}')
    if text.flag('attention_bias', False):
        raise text.fail('attention_bias', 'is true, the decoder here has no biases')
    return TextConfig(
        vocab_size=vocabulary, hidden_size=text.integer('hidden_size'),
        num_layers=text.integer('num_hidden_layers'), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, intermediate_size=text.integer('intermediate_size'),
        mrope_section=(section[0], section[1], section[2]), rope_theta=theta,
        rms_norm_eps=text.number('rms_norm_eps', 1e-6))


def _vision(vision: Fields, hidden: int) -> VisionConfig:
    taps = vision.integers('deepstack_visual_indexes') if 'deepstack_visual_indexes' in vision \
        else tuple(_VISION['deepstack_visual_indexes'])  # type: ignore[arg-type]
    numbers = {name: vision.integer(name, int(str(default)))
               for name, default in _VISION.items() if name != 'deepstack_visual_indexes'}
    if numbers['hidden_size'] % (4 * numbers['num_heads']):  # half of a head turns by row
        raise vision.fail('num_heads', f'is {numbers["num_heads"]}, must divide hidden_size '
                          f'{numbers["hidden_size"]} into multiples of 4')
    out = vision.integer('out_hidden_size', hidden)
    if out != hidden:
        raise vision.fail('out_hidden_size', f'is {out}, the decoder takes rows of {hidden}')
    if not taps or max(taps) >= numbers['depth']:
        raise vision.fail('deepstack_visual_indexes', f'is {list(taps)}, must name some of the '
                          f'{numbers["depth"]} blocks')
    return VisionConfig(deepstack_layers=taps, out_hidden_size=out, **numbers)


def _expert(fields: Fields, stack: Fields, text: TextConfig) -> ExpertConfig:
    """Return the expert's widths; what it must share with the decoder is compared."""
    for name, own in (('num_hidden_layers', text.num_layers),
                      ('num_key_value_heads', text.num_kv_heads), ('head_dim', text.head_dim)):
        found = stack.integer(name, own)
        if found != own:
            raise stack.fail(name, f'is {found}, the decoder whose cache the expert reads has '
                             f'{own}')
    projection = fields.child('action_in_proj_cfg')
    projection.target('PerWaypointActionInProjV2')
    fields.optional('action_out_proj_cfg').target('Linear')
    heads = stack.integer('num_attention_heads')
    if heads % text.num_kv_heads:
        raise stack.fail('num_attention_heads', f'is {heads}, must be a multiple of '
                         f'{text.num_kv_heads} KV heads')
    return ExpertConfig(
        hidden_size=stack.integer('hidden_size'), num_heads=heads,
        intermediate_size=stack.integer('intermediate_size'),
        in_proj_hidden_size=projection.integer('hidden_size'),
        in_proj_layers=projection.integer('num_enc_layers'),
        num_fourier_feats=projection.integer('num_fourier_feats', 20, least=2),
        max_freq=projection.number('max_freq', 100.0))


def _action_space(fields: Fields) -> ActionSpaceConfig:
    fields.target('UnicycleAccelCurvatureActionSpace')
    own = ActionSpaceConfig()
    scalars = ('dt', 'accel_mean', 'accel_std', 'curvature_mean', 'curvature_std', 'v_lambda',
               'v_ridge', 'theta_lambda', 'theta_ridge', 'a_lambda', 'a_ridge', 'kappa_lambda',
               'kappa_ridge')
    values: dict[str, Any] = {name: fields.number(name, getattr(own, name)) for name in scalars}
    for name in ('accel_bounds', 'curvature_bounds'):
        values[name] = fields.numbers(name, 2, getattr(own, name))
    if min(values['dt'], values['accel_std'], values['curvature_std']) <= 0:
        raise fields.fail('dt, accel_std, curvature_std', 'must be above zero')
    return replace(own, n_waypoints=fields.integer('n_waypoints', own.n_waypoints), **values)


def _history(fields: Fields, first_bin: int) -> HistoryConfig:
    """Return the delta tokeniser of the ego history."""
    history = fields.optional('hist_traj_tokenizer_cfg')
    history.target('DeltaTrajectoryTokenizer')
    if history.flag('predict_yaw', False):
        raise history.fail('predict_yaw', 'is true, the history here has x, y and z only')
    own = HistoryConfig()
    low = history.numbers('ego_xyz_min', 3, own.delta_min)
    high = history.numbers('ego_xyz_max', 3, own.delta_max)
    if any(top <= bottom for bottom, top in zip(low, high)):
        raise history.fail('ego_xyz_max', f'is {list(high)}, must lie above {list(low)}')
    padded = history.flag('pad_origin_at_beginning', True)
    tokens = fields.integer('tokens_per_history_traj', 48)
    poses, rest = divmod(tokens, 3)
    poses += not padded
    if rest or poses != own.num_poses:
        raise fields.fail('tokens_per_history_traj', f'is {tokens}, {own.num_poses} poses give '
                          f'{3 * (own.num_poses - (not padded))}')
    return replace(own, num_bins=history.integer('num_bins', own.num_bins),
                   delta_min=(low[0], low[1], low[2]), delta_max=(high[0], high[1], high[2]),
                   first_bin_offset=first_bin)


def _flow(fields: Fields) -> FlowConfig:
    fields.target('FlowMatching')
    method = fields.text('int_method', 'euler')
    if method != 'euler':
        raise fields.fail('int_method', f'is {method!r}, only euler is known here')
    return FlowConfig(num_steps=fields.integer('num_inference_steps', FlowConfig().num_steps))


def _tokens(fields: Fields, nested: bool, vocabulary: int) -> tuple[TokenIds, int]:
    """Return the ids, and where the history's bins begin, counted from <i0>."""
    if not fields.flag('add_special_tokens', True):
        raise fields.fail('add_special_tokens', 'is false, then <|cot_start|> is no token')
    bins = fields.integer('traj_vocab_size', fields.integer('history_vocab_size', 1000)
                          + fields.integer('future_vocab_size', 3000))
    if nested:
        named, pads = fields.child('traj_ids'), '_pad'
        starts = [named.integer(n) for n in ('history_id0', 'future_id0')]
        first, first_bin = min(starts), starts[0] - min(starts)
    else:
        named, pads = fields.child('traj_token_ids'), ''
        first = fields.integer('traj_token_start_idx')
        fields.optional('traj_tokenizer_cfg').target('DiscreteTrajectoryTokenizer')
        first_bin = fields.optional('traj_tokenizer_cfg').integer('num_bins', 3000)
    ids = {}
    for name, place in _PLACE.items():
        spelt = name + pads if name in ('history', 'future') else name
        expected = first + bins + place
        found = expected if name.startswith('cot') else named.integer(spelt)
        if found != expected:
            raise named.fail(spelt, f'is {found}; behind {bins} bins from {first} the released '
                             f'tokenizer puts it at {expected}')
        ids[name] = found
    if max(ids.values()) >= vocabulary:
        raise fields.fail('vocab_size', f'is {vocabulary}, the ids go up to {max(ids.values())}')
    return TokenIds(
        **_base_ids(fields.optional('vlm_config')), cot_start=ids['cot_start'],
        cot_end=ids['cot_end'], traj_history_start=ids['history_start'],
        traj_history=ids['history'], traj_history_end=ids['history_end'],
        traj_future_start=ids['future_start'], traj_token_start=first, forbidden_start=first,
        forbidden_end=first + bins), first_bin


def _base_ids(backbone: Fields) -> dict[str, int]:
    """Return the ids of the tokens that Qwen's own tokenizer has."""
    end_of_text = backbone.optional('text_config').integer('bos_token_id', _QWEN_END_OF_TEXT,
                                                           least=0)
    found = {name: backbone.integer(name, default) for name, default in _QWEN_IDS.items()}
    return {'pad': end_of_text, 'im_start': end_of_text + 1, 'im_end': end_of_text + 2,
            'image_pad': found['image_token_id'],
            'vision_start': found['vision_start_token_id'],
            'vision_end': found['vision_end_token_id']}


def _prompt(fields: Fields, kind: str) -> PromptConfig:
    """Return what the prompt holds; R1's has neither labels nor a route, 1.5 brought both."""
    later = kind != 'alpamayo_r1'
    return PromptConfig('chat', camera_names=fields.flag('include_camera_ids', later),
                        frame_numbers=fields.flag('include_frame_nums', later), navigation=later)


def _cameras(family: Family, vision: VisionConfig, least: int, most: int) -> CameraConfig:
    """Return the cameras and the size that a 16:9 image has after smart-resize."""
    step = vision.patch_size * vision.spatial_merge_size
    height, width = smart_size(1080, 1920, step, least, most)
    return CameraConfig(names=tuple(CAMERA_NAMES[i] for i in family.cameras), ids=family.cameras,
                        height=height, width=width, resize='bicubic', min_pixels=least,
                        max_pixels=most)
