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
from model_reference import (
    IMAGE_PAD,
    mixed_prompt,
    reference_model,
    small_target,
    three_axis_positions,
    VOCAB,
)
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from rspec_planner.model.config import TextConfig
from rspec_planner.model.image import patchify
from rspec_planner.model.layer import attend, fold_mask, RmsNorm
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import add_visual, KVCache, place_visual

GRID = (4, 6)


def tables(cfg: TextConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    return mrope_cos_sin(positions, cfg.head_dim, cfg.rope_theta, cfg.mrope_section)


def prompt_inputs(target: Target, ids: Tensor, seed: int = 1):
    """Hidden rows, tables, mask and DeepStack features of a prompt with random images."""
    generator = torch.Generator().manual_seed(seed)
    count = int((ids == IMAGE_PAD).sum()) // 6
    images = torch.randint(0, 256, (count, 64, 96, 3), dtype=torch.uint8, generator=generator)
    patches = patchify(images)
    features, deepstack = target.vision(patches, GRID)
    mask = ids == IMAGE_PAD
    hidden = place_visual(target.text.embed(ids), mask, features)
    positions, delta = three_axis_positions(ids[0])
    cos, sin = tables(target.cfg.text, positions)
    return hidden, cos, sin, mask, deepstack, patches, delta


@pytest.fixture(scope='module', params=['separate', 'packed'])
def target(request) -> Target:
    built = small_target()
    return built.pack() if request.param == 'packed' else built


@pytest.fixture(scope='module')
def prompt() -> Tensor:
    return mixed_prompt(torch.Generator().manual_seed(5))


def reference_logits(target: Target, ids: Tensor, patches: Tensor, cache=None) -> Tensor:
    count = patches.shape[0]
    out = reference_model(target)(
        input_ids=ids, pixel_values=patches.flatten(0, 1),
        image_grid_thw=torch.tensor([[1, *GRID]] * count),
        mm_token_type_ids=(ids == IMAGE_PAD).int(), cache=cache, use_cache=cache is not None)
    return out.logits


def test_positions_equal_the_reference_index(target, prompt):
    positions, delta = three_axis_positions(prompt[0])
    count = int((prompt == IMAGE_PAD).sum()) // 6
    want, want_delta = reference_model(target).model.get_rope_index(
        prompt, (prompt == IMAGE_PAD).int(), torch.tensor([[1, *GRID]] * count))
    assert torch.equal(positions, want[:, 0])
    assert delta == int(want_delta)


def test_rotary_tables_equal_the_reference(target, prompt):
    positions, _ = three_axis_positions(prompt[0])
    rotary = reference_model(target).model.language_model.rotary_emb
    want = rotary(torch.zeros(1), positions[:, None])
    for mine, theirs in zip(tables(target.cfg.text, positions), want):
        torch.testing.assert_close(mine, theirs[0], rtol=0, atol=1e-6)


@torch.no_grad()
def test_logits_with_images_equal_the_reference(target, prompt):
    hidden, cos, sin, mask, deepstack, patches, _ = prompt_inputs(target, prompt)
    out = target.text(hidden, cos, sin, visual_mask=mask, deepstack=deepstack)
    want = reference_logits(target, prompt, patches)
    assert float(want.std()) > 0.3
    torch.testing.assert_close(target.text.logits(out), want, rtol=0, atol=1e-4)
    without = target.text(hidden, cos, sin)
    assert float((target.text.logits(without) - want).abs().max()) > 1e-2


@torch.no_grad()
def test_deepstack_a_layer_late_is_noticed(target, prompt):
    hidden, cos, sin, mask, deepstack, _, _ = prompt_inputs(target, prompt)
    right = target.text(hidden, cos, sin, visual_mask=mask, deepstack=deepstack)
    late = [torch.zeros_like(deepstack[0]), *deepstack]
    wrong = target.text(hidden, cos, sin, visual_mask=mask, deepstack=late)
    assert float((right - wrong).abs().max()) > 1e-2


@torch.no_grad()
def test_cached_decoding_equals_the_reference(target, prompt):
    hidden, cos, sin, mask, deepstack, patches, delta = prompt_inputs(target, prompt)
    rows, cfg = prompt.shape[1], target.cfg.text
    following = torch.randint(20, VOCAB, (1, 6), generator=torch.Generator().manual_seed(2))
    cache = KVCache(cfg, 1, rows + 16)
    target.text(hidden, cos, sin, cache, 0, mask, deepstack)
    model, state = reference_model(target), DynamicCache()
    model(input_ids=prompt, pixel_values=patches.flatten(0, 1),
          image_grid_thw=torch.tensor([[1, *GRID]] * patches.shape[0]),
          mm_token_type_ids=(prompt == IMAGE_PAD).int(), cache=state, use_cache=True)
    for step in range(6):
        position = torch.tensor([rows + step + delta])
        c, s = tables(cfg, position.expand(3, -1))
        token = following[:, step:step + 1]
        out = target.text(target.text.embed(token), c, s, cache, rows + step)
        want = model(input_ids=token, cache=state, use_cache=True,
                     position_ids=position.view(1, 1, 1).expand(3, 1, 1)).logits
        torch.testing.assert_close(target.text.logits(out), want, rtol=0, atol=1e-4)


def random_rows(target: Target, count: int, batch: int = 1, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, VOCAB, (batch, count), generator=generator)
    cos, sin = tables(target.cfg.text, torch.arange(count).expand(3, -1))
    return target.text.embed(ids).detach(), cos, sin


@torch.no_grad()
@pytest.mark.parametrize('width', [1, 2, 5])
@pytest.mark.parametrize('on_device', [False, True])
def test_blocks_over_the_cache_equal_one_whole_pass(target, width, on_device):
    hidden, cos, sin = random_rows(target, 24, batch=2)
    whole = target.text(hidden, cos, sin)
    cache = KVCache(target.cfg.text, 2, 40)
    parts = [target.text(hidden[:, :9], cos[:9], sin[:9], cache)]
    for start in range(9, 24, width):
        end = min(start + width, 24)
        where = torch.tensor([start]) if on_device else start
        parts.append(target.text(hidden[:, start:end], cos[start:end], sin[start:end], cache,
                                 where))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize('on_device', [False, True])
@pytest.mark.parametrize('poison', [1e4, -1e4])
def test_stale_rows_beyond_the_query_never_matter(target, on_device, poison):
    hidden, cos, sin = random_rows(target, 20)
    results = []
    for dirty in (False, True):
        cache = KVCache(target.cfg.text, 1, 32)
        if dirty:
            cache.keys.fill_(poison)
            cache.values.fill_(poison)
        out = [target.text(hidden[:, :10], cos[:10], sin[:10], cache)]
        # a rejected block: its rows 12.. stay behind and are overwritten in part
        for start, end in ((10, 18), (12, 15), (15, 16)):
            where = torch.tensor(start) if on_device else start
            out.append(target.text(hidden[:, start:end], cos[start:end], sin[start:end], cache,
                                   where))
        results.append(torch.cat(out, 1))
    assert torch.equal(*results)


@torch.no_grad()
def test_prefill_ignores_what_the_cache_held(target):
    hidden, cos, sin = random_rows(target, 12)
    cache = KVCache(target.cfg.text, 1, 16)
    clean = target.text(hidden, cos, sin, cache)
    kept = cache.keys.clone()
    cache.keys[:, :, :, :12] = 99.0
    assert torch.equal(target.text(hidden, cos, sin, cache), clean)
    assert torch.equal(cache.keys, kept)


@torch.no_grad()
def test_a_tree_mask_hides_siblings(target):
    """Rows 9 and 10 are siblings; 11 continues 9: it equals the chain without row 10."""
    hidden, cos, sin = random_rows(target, 12)
    cache = KVCache(target.cfg.text, 1, 16)
    target.text(hidden[:, :9], cos[:9], sin[:9], cache)
    order = torch.tensor([9, 9, 10])  # depth of each node
    c, s = cos[order], sin[order]
    mask = torch.ones(1, 1, 3, 12, dtype=torch.bool)
    mask[..., 1, 9] = False
    mask[..., 2, 10] = False
    tree = target.text(hidden[:, 9:], c, s, cache, 9, attn_mask=mask)
    chain = KVCache(target.cfg.text, 1, 16)
    target.text(hidden[:, :9], cos[:9], sin[:9], chain)
    rows = torch.stack((hidden[:, 9], hidden[:, 11]), 1)
    want = target.text(rows, cos[9:11], sin[9:11], chain, 9)
    torch.testing.assert_close(tree[:, [0, 2]], want, rtol=0, atol=2e-5)
    again = target.text(hidden[:, 9:], c, s, cache, torch.tensor(9),
                        attn_mask=torch.cat((mask, torch.ones(1, 1, 3, 4, dtype=torch.bool)), -1))
    torch.testing.assert_close(again, tree, rtol=0, atol=2e-5)


@torch.no_grad()
def test_right_padding_changes_no_row_before_it(target):
    hidden, cos, sin = random_rows(target, 15)
    padded = torch.cat((hidden, torch.randn(1, 4, hidden.shape[-1])), 1)
    cos_p, sin_p = tables(target.cfg.text, torch.arange(19).expand(3, -1))
    torch.testing.assert_close(target.text(padded, cos_p, sin_p)[:, :15],
                               target.text(hidden, cos, sin), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize('count', [1, 3])
def test_last_rows_are_the_last_rows_and_still_fill_the_cache(target, prompt, count):
    hidden, cos, sin, mask, deepstack, _, _ = prompt_inputs(target, prompt)
    caches = [KVCache(target.cfg.text, 1, 64) for _ in range(2)]
    whole, every = target.text(hidden, cos, sin, caches[0], 0, mask, deepstack, taps=(1, 3))
    last, taps = target.text(hidden, cos, sin, caches[1], 0, mask, deepstack, taps=(1, 3),
                             last_rows=count)
    assert last.shape == (1, count, hidden.shape[-1])
    torch.testing.assert_close(last, whole[:, -count:], rtol=0, atol=1e-5)
    assert torch.equal(taps[0], every[0])
    torch.testing.assert_close(taps[1], every[1][:, -count:], rtol=0, atol=1e-5)
    assert torch.equal(caches[0].keys, caches[1].keys)
    for where in (30, torch.tensor(30)):
        block = target.text(hidden[:, :4], cos[:4], sin[:4], caches[0], where, last_rows=count)
        full = target.text(hidden[:, :4], cos[:4], sin[:4], caches[1], 30)
        torch.testing.assert_close(block, full[:, -count:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_taps_and_kv_are_those_of_the_layers(target, prompt):
    hidden, cos, sin, mask, deepstack, patches, _ = prompt_inputs(target, prompt)
    cache = KVCache(target.cfg.text, 1, prompt.shape[1])
    out, taps, keys, values = target.text(hidden, cos, sin, cache, 0, mask, deepstack,
                                          taps=(0, 2, 3), return_kv=True)
    torch.testing.assert_close(target.text.norm(taps[2]), out)
    assert torch.equal(keys, cache.keys) and torch.equal(values, cache.values)
    states = []
    model = reference_model(target).model.language_model
    model.layers[1].register_forward_pre_hook(lambda m, args: states.append(args[0]))
    model.layers[3].register_forward_pre_hook(lambda m, args: states.append(args[0]))
    positions, _ = three_axis_positions(prompt[0])
    model(inputs_embeds=hidden, position_ids=positions[:, None], visual_pos_masks=mask,
          deepstack_visual_embeds=[d.flatten(0, 1) for d in deepstack])
    torch.testing.assert_close(taps[0], states[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(taps[1], states[1], rtol=0, atol=1e-4)
    only, listed = target.text(hidden, cos, sin, taps=(1,))
    assert only.shape == listed[0].shape and len(listed) == 1


def test_training_reaches_every_weight_and_drops_packed_projections(prompt):
    target = small_target().pack()
    target.train()
    assert target.text.layers[0].packed is None
    hidden, cos, sin, mask, deepstack, _, _ = prompt_inputs(target, prompt)
    batched = cos[None].expand(1, -1, -1), sin[None].expand(1, -1, -1)
    out = target.text(hidden, *batched, visual_mask=mask, deepstack=deepstack)
    target.text.logits(out).square().sum().backward()
    missing = [name for name, weight in target.named_parameters()
               if weight.grad is None and not name.startswith('expert.')]
    assert not missing


def test_gradients_pass_a_packed_target_by():
    target = small_target().pack()
    hidden, cos, sin = random_rows(target, 6)
    target.text(hidden, cos, sin).sum().backward()
    assert target.text.layers[0].packed is not None
    assert target.text.layers[0].self_attn.q_proj.weight.grad is not None
    assert target.text.layers[0].mlp.up_proj.weight.grad is not None


def test_mixed_precision_training_stays_near_fp32(prompt):
    target = small_target().train()
    hidden, cos, sin, mask, deepstack, _, _ = prompt_inputs(target, prompt)
    exact = target.text(hidden, cos, sin, visual_mask=mask, deepstack=deepstack)
    with torch.autocast('cpu', torch.bfloat16):
        out, keys, values = target.text(hidden, cos, sin, visual_mask=mask, deepstack=deepstack,
                                        return_kv=True)
        velocity = target.expert(torch.randn(1, 64, 2), torch.rand(1), keys.detach(),
                                 values.detach(), *tables(target.cfg.text,
                                                          torch.arange(64).expand(3, -1)))
    assert out.dtype == velocity.dtype == torch.float32  # the residual stream stays fp32
    assert keys.dtype == values.dtype == torch.bfloat16
    error = (out - exact).detach().norm() / exact.detach().norm()
    assert 1e-5 < float(error) < 0.05
    (out.sum() + velocity.sum()).backward()
    assert target.text.layers[0].self_attn.k_norm.weight.grad.isfinite().all()


def test_packed_weights_alias_the_checkpoint_weights_and_vanish_on_a_move():
    target = small_target()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    target.pack()
    layer = target.text.layers[0]
    assert layer.packed.qkv.data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
    after = target.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    target.double()
    assert layer.packed is None
    target.pack().load_state_dict(before)
    assert layer.packed is None


def test_norm_statistics_survive_half_precision():
    norm = RmsNorm(64, 1e-6)
    x = torch.full((1, 64), 2.6e4, dtype=torch.float16)  # squares overflow fp16
    with torch.no_grad():
        for module in (norm, norm.half()):
            torch.testing.assert_close(module(x), torch.ones_like(x))


def test_folded_groups_equal_repeated_heads():
    q, k, v = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    visible = torch.rand(2, 1, 3, 7) > 0.4
    visible[..., 0] = True
    got = attend(q, k, v, fold_mask(visible, 3, q.dtype))
    scores = q @ k.repeat_interleave(3, 1).mT / 8 ** 0.5
    weights = scores.masked_fill(~visible, float('-inf')).softmax(-1)
    want = (weights @ v.repeat_interleave(3, 1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, want)


def test_images_go_to_the_masked_rows_in_order():
    hidden = torch.zeros(2, 4, 3)
    mask = torch.tensor([[False, True, True, False], [True, False, False, True]])
    features = torch.arange(12.0).view(2, 2, 3)
    placed = place_visual(hidden, mask, features)
    torch.testing.assert_close(placed[mask], features.flatten(0, 1))
    assert (placed[~mask] == 0).all()
    torch.testing.assert_close(add_visual(placed, mask, features), 2 * placed)


def test_rows_beyond_the_cache_are_refused(target):
    hidden, cos, sin = random_rows(target, 6)
    with pytest.raises(ValueError, match='exceed the cache of 8'):
        target.text(hidden, cos, sin, KVCache(target.cfg.text, 1, 8), 4)
    with pytest.raises(ValueError, match='needs a cache'):
        target.text(hidden, cos, sin, None, torch.tensor(0))
