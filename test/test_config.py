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
import json

from model_reference import small_profile
import pytest
import torch

from rspec_planner.model.config import alpamayo_r1, ProfileConfig, tiny, TokenIds
from rspec_planner.model.target import Target

TOKENS = TokenIds(*range(15))


def on_meta(profile: ProfileConfig) -> Target:
    with torch.device('meta'):
        return Target(profile)


def count(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def test_released_shapes_have_exactly_the_released_parameters():
    target = on_meta(alpamayo_r1())
    assert target.num_parameters() == 11_078_526_194
    vision, text, expert = target.vision, target.text, target.expert
    assert count(vision) == 576_388_336
    assert count(text.embed_tokens) == count(text.lm_head) == 637_734_912
    assert count(text) - 2 * 637_734_912 == 6_946_075_648
    assert count(vision) + count(text) == 8_797_933_808
    assert count(expert.layers) + count(expert.norm) == 2_279_238_656
    assert count(expert.action_in_proj) == 1_349_632
    assert count(expert.action_out_proj) == 4_098
    assert round(count(vision.blocks) / 1e4) == 41_147
    assert round(count(vision.merger) / 1e4) == 4_012
    assert round(count(vision.deepstack_merger_list) / 1e4) == 12_038


def test_released_tensor_names_and_shapes():
    state = on_meta(alpamayo_r1()).state_dict()
    shapes = {name: tuple(weight.shape) for name, weight in state.items()}
    counts = [sum(name.startswith(part) for name in shapes)
              for part in ('vision.', 'text.', 'expert.layers.', 'expert.norm.',
                           'expert.action_in_proj.', 'expert.action_out_proj.')]
    assert counts[0] + counts[1] == 750
    assert counts[2] + counts[3] == 397
    assert counts[4:] == [10, 2]
    assert shapes['vision.patch_embed.proj.weight'] == (1152, 3, 2, 16, 16)
    assert shapes['vision.pos_embed.weight'] == (2304, 1152)
    assert shapes['vision.blocks.26.attn.qkv.weight'] == (3456, 1152)
    assert shapes['vision.blocks.0.mlp.linear_fc1.weight'] == (4304, 1152)
    assert shapes['vision.merger.norm.weight'] == (1152,)
    assert shapes['vision.merger.linear_fc2.weight'] == (4096, 4608)
    assert shapes['vision.deepstack_merger_list.2.norm.weight'] == (4608,)
    assert shapes['text.embed_tokens.weight'] == shapes['text.lm_head.weight'] == (155_697, 4096)
    assert shapes['text.layers.35.self_attn.k_proj.weight'] == (1024, 4096)
    assert shapes['text.layers.35.self_attn.q_norm.weight'] == (128,)
    assert shapes['text.layers.0.mlp.down_proj.weight'] == (4096, 12_288)
    assert shapes['text.norm.weight'] == (4096,)
    assert shapes['expert.layers.35.self_attn.q_proj.weight'] == (2048, 2048)
    assert shapes['expert.layers.0.self_attn.k_proj.weight'] == (1024, 2048)
    assert shapes['expert.layers.0.mlp.gate_proj.weight'] == (8256, 2048)
    assert shapes['expert.layers.0.post_attention_layernorm.weight'] == (2048,)
    assert shapes['expert.action_out_proj.weight'] == (2, 2048)


@pytest.mark.parametrize('vocab_size', [1_000, 3_000])
def test_the_embedded_profile_stays_small(vocab_size):
    target = on_meta(tiny(TOKENS, vocab_size))
    assert 5_000_000 < target.num_parameters() <= 12_000_000


@pytest.mark.parametrize('profile', [tiny(TOKENS, 1_400), alpamayo_r1(), small_profile()],
                         ids=lambda p: p.name)
def test_profiles_keep_the_structural_rules(profile):
    text, vision, expert = profile.text, profile.vision, profile.expert
    assert sum(text.mrope_section) == text.head_dim // 2
    assert text.num_heads % text.num_kv_heads == expert.num_heads % text.num_kv_heads == 0
    assert vision.out_hidden_size == text.hidden_size
    assert vision.hidden_size % (4 * vision.num_heads) == 0
    assert len(vision.deepstack_layers) <= text.num_layers
    assert max(vision.deepstack_layers) < vision.depth
    unit = vision.patch_size * vision.spatial_merge_size
    assert profile.cameras.height % unit == profile.cameras.width % unit == 0


def test_images_are_nine_tenths_of_the_embedded_prompt():
    profile = tiny(TOKENS, 1_400)
    visual = profile.tokens_per_image * len(profile.cameras.names) * profile.cameras.frames
    assert profile.patch_grid == (12, 24) and profile.tokens_per_image == 72
    assert visual == 1_152 and visual / 1_280 >= 0.9
    assert alpamayo_r1().tokens_per_image == 180


@pytest.mark.parametrize('profile', [tiny(TOKENS, 1_400), alpamayo_r1()], ids=lambda p: p.name)
def test_profiles_survive_json(profile):
    assert ProfileConfig.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_stop_ids_are_the_anchor_and_the_end_of_turn():
    assert alpamayo_r1().tokens.stop_ids == (155_681, 151_645)
