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
Action-aware post-training of a draft: what is sampled, how it is rewarded, what is minimised.

For each clip one block of the draft is chosen. At its first few wrong positions the draft draws
K samples, everything else stays as the target said it. The target plans from every altered text
(`aarl_reward`), and the samples that lead to the plan and to the words of the greedy text become
more likely. A KL term to the draft before this training holds what was right already
(arXiv 2606.31160).

All positions of a block are judged behind the target's own tokens. For DFlash that is how it
runs: the positions of a block do not see each other. For EAGLE-3 the chain is fed the target's
tokens and its own outputs; up to the first wrong position this is exactly the deployed chain, and
behind it the block is rejected anyway. The samples of a block are therefore independent of each
other and the product of their probabilities is the exact probability of a rollout.

Every mean is over the whole batch of all processes: n processes take the step that one process
takes with n times the clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
import torch.distributed as dist

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.draft import Draft
from rspec_planner.train.aarl_reward import mix_texts, MixedTexts, plan_errors, Prefix, TextPlanner
from rspec_planner.train.aarl_sampling import choose_starts, contaminated, correct, pick, Randoms
from rspec_planner.train.aarl_settings import AarlSettings
from rspec_planner.train.draft_batch import DraftBatch, DraftRows
from rspec_planner.train.draft_objective import block_hidden, CompactHead

#: weight of positions outside the static set for the anchors 'weighted_all'
_OUTSIDE = 0.05


class AarlObjective:
    """The loss of one draft on clips of a cache; the draft is the only trained part."""

    def __init__(self, draft: Draft, reference: Draft, planner: TextPlanner, rows: DraftRows,
                 settings: AarlSettings) -> None:
        """
        Keep what a step needs.

        reference: a frozen copy of the draft before this training. rows: the clips as the draft
        reads them, of a cache with keys and values of the prompts.
        """
        if rows.cache.prefix is None:
            raise ConfigurationError('post-training plans from cached prompts: build the cache '
                                     'with prefix=True')
        self.draft, self.reference, self.planner = draft, reference, planner
        self.rows, self.cache, self.settings = rows, rows.cache, settings
        self.head = CompactHead(draft)

    def log_policy(self, draft: Draft, batch: DraftBatch) -> Tensor:
        """Return log-probabilities (Bt, A, B - 1, V_d) behind the target's own tokens."""
        return self.head.logits(block_hidden(draft, batch)).float().log_softmax(-1)

    def positions(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """
        Return labels (Bt, A, B - 1) as head rows, and which positions the draft decides.

        Behind `cot_end` the decoder proposes `traj_future_start` whatever the draft says; a
        token outside a reduced head can never be proposed. Both are left alone.
        """
        labels = self.head.index(batch.labels)
        before = torch.cat((batch.anchors[..., None], batch.labels[..., :-1]), dim=-1)
        return labels, (labels >= 0) & (before != self.cache.profile.tokens.cot_end)

    def loss(self, index: Tensor, randoms: Randoms) -> tuple[Tensor, dict[str, Tensor]]:
        """
        Return the loss of clips `index` (Bt,) int64, and what to log, all on the device.

        Its gradient, averaged over processes, is that of one process with all their clips.
        """
        s, batch = self.settings, self.rows.batch(index)
        log_pi = self.log_policy(self.draft, batch)
        labels, free = self.positions(batch)
        with torch.no_grad():
            log_ref = self.log_policy(self.reference, batch)
            right, before = (correct(x, labels) & free for x in (log_pi, log_ref))
            group = draw_group(log_pi, right, free, randoms, s)
            errors, same = self.rewards(index, group, labels, randoms.noise)
            reward = s.text_weight * same - s.trajectory_weight * errors
            advantage = advantages(reward, s.std_floor, s.normalise)
            weight = anchor_weights(s.anchors, before, right, free)
            active = group.active.float()
            counts = means_over_processes(torch.stack((active.sum(), weight.sum())))
        policy = (policy_terms(group.chosen(log_pi), group.drawn, advantage)
                  * active).sum() / counts[0]
        kl = (kl_terms(log_pi, log_ref) * weight).sum() / counts[1]
        parts = {'policy': policy, 'kl': kl, 'reward': average(reward.mean(-1), active),
                 'error': average(errors.mean(-1), active),
                 'same': average(same.mean(-1), active), 'active': active.mean(),
                 'live': right.sum() / before.sum().clamp(min=1),
                 'drifted': (before & ~right).sum() / before.sum().clamp(min=1)}
        return policy + s.kl_weight * kl, {k: v.detach() for k, v in parts.items()}

    def rewards(self, index: Tensor, group: Group, labels: Tensor,
                noise: Tensor) -> tuple[Tensor, Tensor]:
        """
        Return plan errors and shares of right samples, both (Bt, K) fp32.

        noise: (Bt, D, W, 2), common to the greedy text and all samples of a clip.
        """
        teacher = group.at_offsets(labels)[:, None]
        placed = group.offsets[:, None] >= 0
        same = ((group.drawn == teacher) & placed).sum(-1) / placed.sum(-1).clamp(min=1)
        # the greedy text itself is the first of the texts
        sampled = self.head.ids[torch.cat((teacher, group.drawn), dim=1).clamp(min=0)]
        at = torch.where(group.offsets >= 0, group.start[:, None] + 1 + group.offsets, -1)
        cache = self.cache
        texts = mix_texts(cache.ids[index], cache.lengths[index], at, sampled,
                          cache.profile.tokens)
        step = max(self.settings.reward_rows // (sampled.shape[1] * noise.shape[1]), 1)
        parts = []
        for piece in torch.split(torch.arange(len(index), device=index.device), step):
            some = MixedTexts(texts.ids[piece], texts.rows[piece])
            plans = self.planner.plans(self._prefix(index[piece]), some, noise[piece])
            parts.append(plan_errors(plans, some))
        return torch.cat(parts), same.float()

    def _prefix(self, index: Tensor) -> Prefix:
        cache = self.cache
        assert cache.prefix is not None
        return Prefix(cache.prefix[index], cache.prompt_lengths[index],
                      cache.rope_delta[cache.layouts[index]])


@dataclass(frozen=True)
class Group:
    """
    One block of each clip and the samples drawn in it.

    start: (Bt,) anchor. active: (Bt,) bool, there is something to learn. offsets: (Bt, N) place
    in the block counted from 0, -1 for none. drawn: (Bt, K, N) head rows, -1 for none.
    """

    start: Tensor
    active: Tensor
    offsets: Tensor
    drawn: Tensor

    def at_offsets(self, values: Tensor) -> Tensor:
        """Return (Bt, N, ...) of values (Bt, A, B - 1, ...); anything where there is none."""
        row = torch.arange(len(self.start), device=self.start.device)[:, None]
        return values[row, self.start[:, None], self.offsets.clamp(min=0)]

    def chosen(self, log_pi: Tensor) -> Tensor:
        """Return the log-probabilities (Bt, N, V_d) of the contaminated positions."""
        return self.at_offsets(log_pi)


def draw_group(log_pi: Tensor, right: Tensor, free: Tensor, randoms: Randoms,
               settings: AarlSettings) -> Group:
    """
    Choose a block of each clip and draw samples at its first wrong positions.

    log_pi: (Bt, A, B - 1, V_d); right, free: (Bt, A, B - 1) bool: the draft's choice is the
    target's, the draft decides.
    """
    wrong = free & ~right
    start, active = choose_starts(wrong, free, settings.start, randoms.start)
    row = torch.arange(len(start), device=start.device)
    offsets = contaminated(wrong[row, start], settings.positions)
    group = Group(start, active, offsets, offsets)
    weights = group.chosen(log_pi).exp()[:, None].expand(-1, settings.samples, -1, -1)
    drawn = torch.where(offsets[:, None] >= 0, pick(weights, randoms.tokens), -1)
    return Group(start, active, offsets, drawn)


def average(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of values (Bt,), 0 without any weight."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def advantages(rewards: Tensor, floor: float, normalise: bool = True) -> Tensor:
    """Return (Bt, K) rewards minus the mean of their clip, over max(standard deviation, floor)."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    if not normalise:
        return centred
    spread = centred.square().mean(-1, keepdim=True).sqrt()
    return centred / spread.clamp(min=floor)


def policy_terms(chosen: Tensor, drawn: Tensor, advantage: Tensor) -> Tensor:
    """
    Return -A * sum of log pi, mean over the K samples of each clip, (Bt,).

    chosen: (Bt, N, V_d) log-probabilities of the contaminated positions; drawn: (Bt, K, N) head
    rows, negative where there is no position; advantage: (Bt, K), without gradient.
    """
    wanted = drawn.clamp(min=0).transpose(1, 2)
    taken = chosen.gather(2, wanted).transpose(1, 2)
    total = torch.where(drawn >= 0, taken, 0.0).sum(-1)
    return -(advantage.detach() * total).mean(-1)


def kl_terms(policy: Tensor, reference: Tensor) -> Tensor:
    """
    Return KL(policy || reference) (...), the exact sum over the whole draft vocabulary.

    Both are log-probabilities (..., V_d), all finite.
    """
    return (policy.exp() * (policy - reference)).sum(-1)


def anchor_weights(kind: str, right_before: Tensor, right_now: Tensor,
                   known: Tensor) -> Tensor:
    """
    Return the weight of each position in the KL term, shaped like the masks.

    'static': 1 where the draft was right before this training; a position that drifts wrong
    keeps its weight and is pulled back. 'live': 1 where it is right now; what drifts wrong
    leaves the set for good. 'weighted_all': 1 on the static set, 0.05 on the other positions.
    'none': no position.
    """
    if kind == 'static':
        return right_before.float()
    if kind == 'live':
        return right_now.float()
    if kind == 'weighted_all':
        return torch.where(right_before, 1.0, _OUTSIDE) * known
    return torch.zeros_like(known, dtype=torch.float32)


def means_over_processes(counts: Tensor) -> Tensor:
    """
    Return the means of counts (n,) over all processes, each at least a tiny number.

    A local sum divided by such a mean, averaged over the processes, is the sum of all over the
    count of all.
    """
    total = counts.detach().float().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.clamp(min=1e-6)
