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

from draft_reference import Reading, small_draft, small_target
import pytest
import torch

from rspec_planner.model.dflash import block_visible, Dflash
from rspec_planner.model.draft import dflash_config, DraftRotary

ROWS, LENGTH, DELTA = 20, 12, -3


@pytest.fixture(scope='module')
def target():
    return small_target()


def frame(seed, batch=1):
    """Return random taps (3, batch, ROWS, 32), tokens (batch, ROWS) and positions (3, ROWS)."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(3, batch, ROWS, 32, generator=generator)
    tokens = torch.randint(0, 17, (batch, ROWS), generator=generator)
    prompt = torch.randint(0, 9, (3, LENGTH), generator=generator)
    return taps, tokens, DraftRotary.sequence_positions(prompt, LENGTH, DELTA, ROWS + 16)


def packed(draft, taps, tokens, positions, anchors):
    """Return the arguments of `Dflash.block` for anchors (batch, A) over all rows."""
    index = torch.arange(positions.shape[-1])
    cos, sin = DraftRotary.tables(draft.cfg, index, positions)
    kv = draft.context_kv(draft.fuse(taps), cos[:ROWS], sin[:ROWS])
    rows = (anchors[..., None] + torch.arange(draft.cfg.block)).flatten(1)
    mask = block_visible(anchors, torch.arange(ROWS), draft.cfg.block, draft.cfg.window)
    return tokens.gather(1, anchors), cos[rows], sin[rows], kv, mask


@pytest.mark.parametrize('rotary', ['flat', 'mirror'])
@pytest.mark.parametrize('window', [0, 1, 3])
@pytest.mark.parametrize('layers, reduced', [(1, False), (2, True)])
def test_packed_blocks_equal_the_direct_reading(target, rotary, window, layers, reduced):
    draft = small_draft(target, 'dflash', seed=layers, reduced=reduced, rotary=rotary,
                        window=window, num_layers=layers, block=4)
    taps, tokens, positions = frame(window)
    anchors = torch.tensor([[13, 1, 19]])
    hidden = draft.block(*packed(draft, taps, tokens, positions, anchors))
    logits = draft.logits(hidden).view(3, 4, -1)[:, 1:]
    reading = Reading(draft, taps[:, 0], tokens[0], positions)
    for row, p in zip(logits, anchors[0].tolist()):
        torch.testing.assert_close(row, reading.dflash(p, int(tokens[0, p])).float(),
                                   atol=1e-3, rtol=1e-3)


def test_a_block_sees_nothing_at_or_behind_its_anchor(target):
    draft = small_draft(target, 'dflash', block=4, window=0)
    taps, tokens, positions = frame(0)
    anchors = torch.tensor([[14]])
    expected = draft.block(*packed(draft, taps, tokens, positions, anchors))
    changed = taps.clone()
    changed[:, :, 14:] = 1e4
    after = draft.block(*packed(draft, changed, tokens, positions, anchors))
    assert torch.equal(after, expected)
    changed[:, :, 13] += 1.0
    assert not torch.allclose(draft.block(*packed(draft, changed, tokens, positions, anchors)),
                              expected, atol=1e-3)


def test_padding_is_never_seen():
    context = torch.tensor([[-1, -1, 4, 5, 6]])
    seen = block_visible(torch.tensor([[6, 5]]), context, 2, 0)[0, 0]
    assert torch.equal(seen, torch.tensor([
        [0, 0, 1, 1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0, 0, 1, 1]], dtype=torch.bool))
    narrow = block_visible(torch.tensor([[6, -1]]), context, 1, 1)[0, 0]
    assert torch.equal(narrow, torch.tensor([[0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]],
                                            dtype=torch.bool))


@pytest.mark.parametrize('additive', [True, False])
def test_attention_sums_to_one_and_reproduces_the_block(target, additive):
    draft = small_draft(target, 'dflash', block=4, window=3, num_layers=2)
    taps, tokens, positions = frame(1, batch=2)
    *rest, mask = packed(draft, taps, tokens, positions, torch.tensor([[13, 15], [5, 19]]))
    if additive:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, float('-inf'))
    weights, hidden = draft.attention(*rest, mask)
    assert weights.shape == (2, 2, 6, 8, ROWS + 8)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 6, 8))
    assert float(weights[:, 0, :, :4, 13:ROWS].abs().max()) == 0.0
    torch.testing.assert_close(hidden, draft.block(*rest, mask), atol=1e-4, rtol=1e-4)


def test_attention_is_the_softmax_of_the_direct_reading(target):
    draft = small_draft(target, 'dflash', block=3, window=2, num_layers=1)
    taps, tokens, positions = frame(2)
    arguments = packed(draft, taps, tokens, positions, torch.tensor([[13]]))
    weights, _ = draft.attention(*arguments)
    seen = []
    reading = Reading(draft, taps[:, 0], tokens[0], positions)
    attend = reading._attend

    def record(q, keys, values):
        group = draft.cfg.num_heads // draft.cfg.num_kv_heads
        seen.append(torch.stack([
            (torch.stack([k[head // group] for k in keys]) @ q[head] / 4.0).softmax(0)
            for head in range(len(q))]))
        return attend(q, keys, values)

    reading._attend = record
    reading.dflash(13, int(tokens[0, 13]))
    expected = torch.stack(seen, dim=1).float()
    found = weights[0, 0, :, :, [11, 12, 20, 21, 22]]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_packing_changes_nothing(target):
    draft = small_draft(target, 'dflash', block=4, window=0)
    arguments = packed(draft, *frame(3), torch.tensor([[13, 18]]))
    with torch.no_grad():
        plain = draft.block(*arguments)
        torch.testing.assert_close(draft.pack().block(*arguments), plain, atol=1e-5, rtol=1e-5)


def test_gradients_reach_every_weight(target):
    draft = small_draft(target, 'dflash', block=4, window=0).train().requires_grad_(True)
    hidden = draft.block(*packed(draft, *frame(4), torch.tensor([[13, 18]])))
    allowed = draft.logits(hidden)[..., :10]
    allowed.logsumexp(-1).sum().backward()
    for name, weight in draft.named_parameters():
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0.0, name
    assert target.text.lm_head.weight.grad is None


def test_a_warm_start_copies_what_fits(target):
    cold = Dflash(dflash_config(target.cfg, num_layers=2)).initialise(seed=3)
    warm = Dflash(dflash_config(target.cfg, num_layers=2)).initialise(target.text, seed=3)
    for index, layer in zip((1, 3), warm.layers):
        source = target.text.layers[index]
        for name, weight in layer.named_parameters():
            assert torch.equal(weight, source.get_parameter(name)), name
    assert torch.equal(warm.norm.weight, target.text.norm.weight)
    odd = Dflash(dflash_config(target.cfg, intermediate_size=20)).initialise(target.text, seed=3)
    assert torch.equal(odd.layers[0].self_attn.q_proj.weight,
                       target.text.layers[1].self_attn.q_proj.weight)
    assert float(odd.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(
        32 ** -0.5, rel=0.2)
    assert float(cold.layers[0].mlp.down_proj.weight.detach().std()) == pytest.approx(
        0.5 * 48 ** -0.5, rel=0.2)
    again = Dflash(dflash_config(target.cfg, num_layers=2)).initialise(seed=3)
    assert all(torch.equal(a, b) for a, b in zip(cold.parameters(), again.parameters()))


@pytest.mark.parametrize('reduced', [False, True])
def test_a_correction_adds_what_follows_from_the_token_before(target, reduced):
    draft = small_draft(target, 'dflash', reduced=reduced, block=4, correction_rank=3)
    hidden = torch.randn(5, 32)
    previous = torch.tensor([1, 6, 3, 39, 24])  # 3 is no row of the reduced head
    found = draft.logits(hidden, previous) - draft.head(hidden)
    rows = [draft.draft_index(token) for token in previous]
    table = draft.correction.before @ draft.correction.after.T
    for row, added in zip(rows, found):
        expected = table[len(table) - 1 if row < 0 else row]
        seen = ~added.isnan()  # -inf less -inf
        torch.testing.assert_close(added[seen], expected[seen], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match='earlier'):
        draft.logits(hidden)


def test_a_fresh_correction_changes_nothing_and_learns(target):
    draft = Dflash(dflash_config(target.cfg, correction_rank=3)).initialise(target.text)
    draft.bind(target.text, target.cfg.tokens)
    hidden, previous = torch.randn(5, 32), torch.tensor([1, 6, 3, 39, 24])
    logits = draft.logits(hidden, previous)
    assert torch.equal(logits, draft.head(hidden))
    torch.nn.functional.cross_entropy(logits, torch.tensor([2, 5, 6, 7, 8])).backward()
    assert bool(draft.correction.after.grad.isfinite().all())
    assert float(draft.correction.after.grad.abs().max()) > 0.0
