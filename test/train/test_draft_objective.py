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
"""The losses of drafts: who sees what, which labels count, and how much."""

from dataclasses import replace

from draft_toys import toy_cache, toy_target
import pytest
import torch

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.dflash import block_visible, Dflash
from rspec_planner.model.draft import dflash_config, DraftRotary, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.train.draft_batch import DraftRows
from rspec_planner.train.draft_data import draft_vocabulary
from rspec_planner.train.draft_objective import (
    block_hidden,
    CompactHead,
    DraftObjective,
    length_weight,
    LossOptions,
)


@pytest.fixture(scope='module')
def target():
    return toy_target()


@pytest.fixture(scope='module')
def cache(target):
    return toy_cache(target)


def make(target, kind='dflash', **over):
    over = {'block': 5, 'window': 4, **over}
    over.setdefault('taps', (1, 2) if over['window'] else (0, 1))
    build, config = {'dflash': (Dflash, dflash_config), 'eagle3': (Eagle3, eagle3_config)}[kind]
    draft = build(config(target.cfg, **over)).initialise(seed=3)
    return draft.bind(target.text, target.cfg.tokens).eval()


def context_of(draft, cache, clip, anchor):
    """Return taps, following ids, flat index and positions of the rows a draft may see."""
    cfg, length = draft.cfg, int(cache.prompt_lengths[clip])
    columns, p = cache.positions.shape[-1], length + anchor
    rows = range(max(p - cfg.window, 0) if cfg.window else 0, p)
    text = [*cache.prompt_ids[clip, columns - length:].tolist(), *cache.ids[clip].tolist()]
    taps = torch.stack([
        cache.full_taps[list(cfg.taps), clip, columns - length + row]
        if row < length and not cfg.window
        else cache.tail_taps[list(cfg.taps), clip, cache.tail + row - length] for row in rows], 1)
    index = torch.arange(rows.start, p + cfg.block)
    prompt = cache.positions[cache.layouts[clip]][:, columns - length:]
    positions = DraftRotary.sequence_positions(prompt, length, int(cache.rope_delta[0]),
                                               p + cfg.block)[:, rows.start:]
    cos, sin = DraftRotary.tables(cfg, index[None], positions[None])
    return taps[:, None], torch.tensor([text[rows.start + 1:p + 1]]), cos, sin, text[p:]


def reference(draft, cache, clip, anchor):
    """Return normed states (B - 1, H) of one anchor as inference computes them, unbatched."""
    taps, following, cos, sin, said = context_of(draft, cache, clip, anchor)
    count, block = taps.shape[2], draft.cfg.block
    features = draft.fuse(taps)
    if isinstance(draft, Dflash):
        kv = draft.context_kv(features, cos[:, :count], sin[:, :count])
        anchors = torch.tensor([[said[0]]])
        return draft.block(anchors, cos[:, count:], sin[:, count:], kv)[0, 1:]
    past = draft.slot_kv(draft.embed(following[:, :-1]), features[:, :-1], cos[:, :count - 1],
                         sin[:, :count - 1])
    feature, states = features[:, -1:], []
    for step in range(block - 1):
        word = torch.tensor([[max(said[step], 0) if step < len(said) else 0]])
        at = slice(count - 1 + step, count + step)
        feature, own = draft.cell(draft.embed(word), feature, cos[:, at], sin[:, at], past)
        past = tuple(torch.cat(pair, dim=2) for pair in zip(past, own))
        states.append(draft.norm(feature)[0, 0])
    return torch.stack(states)


class TestContext:
    @pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
    @pytest.mark.parametrize('rotary', ['flat', 'mirror'])
    @pytest.mark.parametrize('window', [0, 1, 4])
    def test_every_anchor_sees_what_inference_shows_it(self, target, cache, kind, rotary,
                                                       window):
        draft = make(target, kind, rotary=rotary, window=window)
        index = torch.arange(len(cache))
        with torch.no_grad():
            states = block_hidden(draft, DraftRows(cache, draft.cfg, index).batch(index))
            for clip in (0, 5, 11):
                last = int(cache.lengths[clip]) - 1
                for anchor in range(last):
                    known = min(draft.cfg.block - 1, last - anchor)
                    expected = reference(draft, cache, clip, anchor)
                    torch.testing.assert_close(states[clip, anchor, :known], expected[:known],
                                               rtol=1e-4, atol=1e-4)

    def test_packed_blocks_under_a_window_mask_equal_windows_as_rows(self, target, cache):
        draft = make(target, window=4)
        index = torch.arange(len(cache))
        batch = DraftRows(cache, draft.cfg, index).batch(index)
        count, anchors = batch.anchors.shape
        used, block = batch.visible.shape[1], draft.cfg.block
        kv = draft.context_kv(draft.fuse(batch.taps[0]), batch.cos[:, :used],
                              batch.sin[:, :used])
        places = (torch.arange(anchors) + batch.context).expand(count, -1)
        mask = block_visible(places, torch.arange(used), block, 4)
        cos, sin = (torch.cat([t[:, batch.context + j:batch.context + j + block]
                               for j in range(anchors)], 1) for t in (batch.cos, batch.sin))
        packed = draft.block(batch.anchors, cos, sin, kv, mask).view(count, anchors, block, -1)
        torch.testing.assert_close(block_hidden(draft, batch), packed[:, :, 1:], rtol=1e-4,
                                   atol=1e-4)

    def test_text_only_hides_the_images(self, target, cache):
        draft = make(target, window=0)
        index = torch.arange(4)
        changed = cache.full_taps.clone()
        images = cache.prompt_ids == target.cfg.tokens.image_pad
        changed[:, images] = 3.0
        other = replace(cache, full_taps=changed)

        def states(source, context):
            return block_hidden(draft, DraftRows(source, draft.cfg, index,
                                                 context=context).batch(index))

        with torch.no_grad():
            assert torch.equal(states(cache, 'text'), states(other, 'text'))
            assert not torch.allclose(states(cache, 'all'), states(other, 'all'), atol=1e-3)

    def test_padding_in_front_of_a_short_prompt_is_never_read(self, target, cache):
        draft = make(target, 'eagle3', window=0)
        index = torch.arange(4)
        before = torch.arange(cache.positions.shape[-1]) < (
            cache.positions.shape[-1] - cache.prompt_lengths[:, None])
        changed = cache.full_taps.clone()
        with torch.no_grad():
            first = block_hidden(draft, DraftRows(cache, draft.cfg, index).batch(index))
            changed[:, before] = 5.0
            second = block_hidden(draft, DraftRows(replace(cache, full_taps=changed), draft.cfg,
                                                   index).batch(index))
        assert torch.equal(first, second)

    @pytest.mark.parametrize('over, message', [
        ({'window': 99}, 'window 99'), ({'window': 0, 'taps': (1, 2)}, 'full=True')])
    def test_a_cache_that_lacks_rows_is_refused(self, target, cache, over, message):
        with pytest.raises(ConfigurationError, match=message):
            DraftRows(cache, make(target, **over).cfg, torch.arange(4))


class TestLabels:
    def test_labels_are_the_tokens_behind_each_anchor(self, target, cache):
        index = torch.arange(len(cache))
        batch = DraftRows(cache, make(target).cfg, index).batch(index)
        for clip in range(len(cache)):
            text = cache.ids[clip, :cache.lengths[clip]].tolist()
            for j in range(len(text) - 1):
                found = batch.labels[clip, j].tolist()
                behind = text[j + 1:j + 5]
                assert batch.anchors[clip, j] == text[j]
                assert found == behind + [-1] * (4 - len(behind))
            assert (batch.labels[clip, len(text) - 1:] == -1).all()

    def test_reduced_head_skips_words_it_does_not_have(self, target, cache):
        ids, share = draft_vocabulary(cache, torch.arange(len(cache)))
        assert share == 1.0 and target.cfg.tokens.cot_end in ids
        draft = make(target, draft_vocab=len(ids))
        draft.set_vocabulary(ids)
        head = CompactHead(draft)
        assert head.index(torch.tensor([int(ids[2]), 1, -1])).tolist() == [2, -1, -1]
        with pytest.raises(ConfigurationError, match='cover'):
            draft_vocabulary(cache, torch.arange(1))

    def test_the_full_head_equals_the_reduced_one_on_its_ids(self, target, cache):
        ids, _ = draft_vocabulary(cache, torch.arange(len(cache)))
        whole = make(target)
        small = make(target, draft_vocab=len(ids))
        small.set_vocabulary(ids)
        hidden = torch.randn(3, 64)
        first, second = CompactHead(whole), CompactHead(small)
        torch.testing.assert_close(first.logits(hidden)[:, first.index(ids)],
                                   second.logits(hidden))
        assert not ((first.ids >= 177) & (first.ids < target.cfg.tokens.forbidden_end)).any()


class TestLoss:
    def loss(self, target, cache, kind='dflash', over=None, **options):
        draft = make(target, kind, **(over or {}))
        index = torch.arange(len(cache))
        view = DraftRows(cache, draft.cfg, index, teacher=True)
        objective = DraftObjective(draft, target.text, LossOptions(**options)).eval()
        return objective, view.batch(index)

    @pytest.mark.parametrize('kind, weights', [
        ('dflash', torch.exp(-torch.arange(4) / 2.0)), ('eagle3', 0.5 ** torch.arange(4))])
    def test_weighted_cross_entropy_over_all_partial_blocks(self, target, cache, kind, weights):
        objective, batch = self.loss(target, cache, kind, gamma=2.0, decay=0.5, first_weight=3.0)
        weights = weights.clone().float()
        weights[0] *= 3.0
        states = block_hidden(objective.draft, batch)
        logits = states @ target.text.lm_head.weight.t()
        logits[..., target.cfg.tokens.forbidden_start:target.cfg.tokens.forbidden_end] = -1e30
        top = below = 0.0
        for n, j, i in (batch.labels >= 0).nonzero().tolist():
            chance = logits[n, j, i].log_softmax(-1)[batch.labels[n, j, i]]
            top, below = top - weights[i] * chance, below + weights[i]
        torch.testing.assert_close(objective(batch)[0], top / below, rtol=1e-4, atol=1e-5)

    def test_default_gamma_is_the_published_one(self, target):
        for block, gamma in ((8, 4.0), (16, 7.0), (24, 10.0)):
            draft = make(target, block=block)
            weight = DraftObjective(draft, target.text, LossOptions()).offset_weight
            assert float(weight[1]) == pytest.approx(float(torch.tensor(-1 / gamma).exp()))

    def test_soft_labels_that_are_certain_equal_hard_ones(self, target, cache):
        objective, batch = self.loss(target, cache, soft_weight=1.0)
        # states whose logits are far apart: the label is the row of the head they point to
        rows, norm = cache.ids.clamp(min=0), target.text.norm
        sharp = CompactHead(objective.draft)
        sharp.weight = torch.nn.functional.normalize(sharp.weight, dim=-1) * 60.0
        objective.head = sharp
        normed = torch.nn.functional.normalize(target.text.lm_head.weight[rows], dim=-1)
        batch = replace(batch, teacher=normed / norm.weight)
        soft = objective(batch)[0]
        hard = DraftObjective(objective.draft, target.text, LossOptions())
        hard.head = sharp
        torch.testing.assert_close(soft, hard.eval()(batch)[0], rtol=1e-3, atol=1e-3)

    def test_full_blocks_only_drop_the_end_of_the_text(self, target, cache):
        objective, batch = self.loss(target, cache, partial_blocks=False)
        seen = []
        objective.head.index = lambda labels: seen.append(labels) or labels.clamp(max=0)
        objective(batch)
        whole = (batch.labels >= 0).all(-1)
        assert ((seen[0] >= 0).any(-1) == whole).all() and not whole.all()

    def test_random_masks_hide_offsets_from_their_own_block(self, target, cache):
        draft = make(target)
        index = torch.arange(len(cache))
        batch = DraftRows(cache, draft.cfg, index).batch(index)
        kept = torch.full(batch.anchors.shape, 2)
        short = make(target, block=3)
        short.load_state_dict(draft.state_dict())
        expected = block_hidden(short, DraftRows(cache, short.cfg, index).batch(index))
        torch.testing.assert_close(block_hidden(draft, batch, kept=kept)[:, :, :2], expected,
                                   rtol=1e-4, atol=1e-4)
        with pytest.raises(ConfigurationError, match='random_masks'):
            DraftObjective(make(target, 'eagle3'), target.text, LossOptions(random_masks=True))

    def test_a_short_unroll_trains_the_first_steps_only(self, target, cache):
        objective, batch = self.loss(target, cache, 'eagle3', unroll=2)
        whole = block_hidden(objective.draft, batch)
        torch.testing.assert_close(block_hidden(objective.draft, batch, steps=2),
                                   whole[:, :, :2])
        assert objective.steps == 2 and len(objective.offset_weight) == 2


def test_length_weight_is_the_gradient_of_the_expected_length():
    generator = torch.Generator().manual_seed(0)
    log_p = torch.rand((5, 6), generator=generator).log().requires_grad_()
    valid = torch.arange(6) < torch.tensor([6, 3, 1, 5, 2])[:, None]
    expected = ((log_p * valid).cumsum(-1).exp() * valid).sum()
    expected.backward()
    weight = length_weight((log_p * valid).detach(), valid, 1.0) * valid
    torch.testing.assert_close(weight, log_p.grad, rtol=1e-4, atol=2e-4)
