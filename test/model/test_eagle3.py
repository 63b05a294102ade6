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

from rspec_planner.model.draft import DraftRotary, eagle3_config
from rspec_planner.model.eagle3 import chain_visible, Eagle3

ROWS, LENGTH, DELTA = 20, 12, -3


@pytest.fixture(scope='module')
def target():
    return small_target()


def frame(seed, batch=1):
    """Return random taps (3, batch, ROWS, 32), tokens (batch, ROWS + 1), positions (3, ..)."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(3, batch, ROWS, 32, generator=generator)
    tokens = torch.randint(0, 17, (batch, ROWS + 1), generator=generator)
    prompt = torch.randint(0, 9, (3, LENGTH), generator=generator)
    return taps, tokens, DraftRotary.sequence_positions(prompt, LENGTH, DELTA, ROWS + 16)


def chains(draft, taps, tokens, positions, anchors):
    """Return the logits (batch, A, B - 1, V_d) of greedy chains behind anchors (batch, A)."""
    cos, sin = DraftRotary.tables(draft.cfg, torch.arange(positions.shape[-1]), positions)
    features = draft.fuse(taps)
    past = draft.slot_kv(draft.embed(tokens[:, 1:]), features, cos[:ROWS], sin[:ROWS])
    ids = tokens.gather(1, anchors)
    feature = features.gather(1, (anchors - 1)[..., None].expand(-1, -1, 32))
    out = []
    for step in range(draft.cfg.block - 1):
        at = anchors - 1 + step
        mask = chain_visible(anchors, torch.arange(ROWS), step, draft.cfg.window)
        feature, own = draft.cell(draft.embed(ids), feature, cos[at], sin[at], past, mask)
        past = tuple(torch.cat(pair, dim=2) for pair in zip(past, own))
        out.append(draft.logits(feature))
        ids = draft.target_ids(out[-1].argmax(-1))
    return torch.stack(out, dim=2)


@pytest.mark.parametrize('rotary', ['flat', 'mirror'])
@pytest.mark.parametrize('window', [0, 1, 3])
@pytest.mark.parametrize('reduced', [False, True])
def test_packed_chains_equal_the_direct_reading(target, rotary, window, reduced):
    draft = small_draft(target, 'eagle3', seed=window, reduced=reduced, rotary=rotary,
                        window=window, block=5)
    taps, tokens, positions = frame(window)
    anchors = torch.tensor([[13, 1, 19]])
    logits = chains(draft, taps, tokens, positions, anchors)
    reading = Reading(draft, taps[:, 0], tokens[0], positions)
    for row, p in zip(logits[0], anchors[0].tolist()):
        proposals, expected = reading.eagle3(p, int(tokens[0, p]))
        assert torch.equal(draft.target_ids(row.argmax(-1)), proposals)
        torch.testing.assert_close(row, expected.float(), atol=1e-3, rtol=1e-3)


def test_a_chain_sees_nothing_at_or_behind_its_anchor(target):
    draft = small_draft(target, 'eagle3', block=4, window=0)
    taps, tokens, positions = frame(5)
    anchors = torch.tensor([[14]])
    expected = chains(draft, taps, tokens, positions, anchors)
    taps[:, :, 14:] = 1e4
    tokens[:, 15:] = 3
    assert torch.equal(chains(draft, taps, tokens, positions, anchors), expected)
    taps[:, :, 13] += 1.0
    after = chains(draft, taps, tokens, positions, anchors)
    assert not torch.allclose(after[..., :10], expected[..., :10], atol=1e-3)


def test_who_sees_whom():
    slots = torch.tensor([-1, 2, 3, 4, 5])
    seen = chain_visible(torch.tensor([[5, 4]]), slots, 1, 2)[0, 0]
    assert torch.equal(seen, torch.tensor([[0, 0, 1, 0, 0, 1, 0, 1, 0],
                                           [0, 1, 0, 0, 0, 0, 1, 0, 1]], dtype=torch.bool))
    everything = chain_visible(torch.tensor([[5, 4]]), slots, 0, 0)[0, 0]
    assert torch.equal(everything, torch.tensor([[0, 1, 1, 0, 0, 1, 0],
                                                 [0, 1, 0, 0, 0, 0, 1]], dtype=torch.bool))


def test_gradients_reach_every_weight(target):
    draft = small_draft(target, 'eagle3', block=4, window=0).train().requires_grad_(True)
    logits = chains(draft, *frame(6), torch.tensor([[13, 18]]))
    logits[..., :10].logsumexp(-1).sum().backward()
    for name, weight in draft.named_parameters():
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0.0, name


def test_a_warm_start_copies_what_fits(target):
    cold = Eagle3(eagle3_config(target.cfg)).initialise(seed=1)
    warm = Eagle3(eagle3_config(target.cfg)).initialise(target.text, seed=1)
    source = target.text.layers[3]
    for name in ('q_proj', 'k_proj', 'v_proj'):
        own = warm.self_attn.get_parameter(f'{name}.weight')
        assert torch.equal(own[:, 32:], source.self_attn.get_parameter(f'{name}.weight'))
        assert torch.equal(own[:, :32],
                           cold.self_attn.get_parameter(f'{name}.weight')[:, :32])
    assert torch.equal(warm.mlp.down_proj.weight, source.mlp.down_proj.weight)
    assert torch.equal(warm.norm.weight, target.text.norm.weight)
    assert float(cold.self_attn.q_proj.weight.detach().std()) == pytest.approx(1 / 8, rel=0.1)
