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
The stage that grows a tree of proposals with EAGLE-3, every node conditioned on its own branch.

Expansion and pruning are those of EAGLE-2 (arXiv 2406.16858): level by level the most probable
nodes, the beams, run through the draft's cell, each over the context and its own ancestors, and
each offers its most probable children. Of all that was offered, the nodes of the highest joint
probability make the tree. A child is never more probable than its parent, so they are connected.

Shapes do not depend on the data: level k always runs the same number of rows, and branches share
one buffer of keys and values under a mask of ancestors. What is chosen stays on the device.
Temporary rows lie behind the anchor; the next call lays the accepted ones out anew from the
target's own states, which it reads from the gathered taps, so no row of a branch outlives a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rspec_planner.engine.draft_executor import ChainStage, check_taps, kept_rows, RotaryRows
from rspec_planner.engine.torch_executor import TorchExecutor
from rspec_planner.errors import ConfigurationError
from rspec_planner.model.draft import Draft
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.target import Target

_FREE, _END = -1, -2  # entries of the rule of tokens; any other dictates the token behind
_NO_RULE: Mapping[int, int] = {}


@dataclass(frozen=True)
class TreeShape:
    """What fixes the sizes of a branch tree."""

    nodes: int  # N, the anchor counted
    depth: int  # the most proposals on a path
    beams: int = 8  # nodes that are expanded per level, and children that each of them offers

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a size that makes no tree."""
        for name, low in (('nodes', 2), ('depth', 1), ('beams', 1)):
            if getattr(self, name) < low:
                raise ConfigurationError(f'tree {name} is {getattr(self, name)}: use {low} or '
                                         'more')


def branch_tree_executor(draft: Draft, target: Target, tokens: Tensor, taps: TapBuffer,
                         positions: Tensor, shape: TreeShape, *,
                         follow: Mapping[int, int] = _NO_RULE, ends: Collection[int] = (),
                         kept: Tensor | None = None) -> TorchExecutor:
    """
    Return the stage that grows the tree behind the anchor at row p = start.

    draft, tokens, taps, positions, inputs: as for `draft_executor`; the draft's block plays no
    part. follow: behind each key only its value is proposed, with certainty; ends: ids behind
    which nothing is. kept: see `kept_rows`, with beams * (depth - 1) rows behind.

    outputs: 'ids', 'parents', 'depths' (N,) int64 and 'ancestors' (N, N) bool, as in
    `decode.tree.Tree`: parents before children, node 0 the anchor; 'scores' (N,) fp32, the joint
    log q. Where there are fewer nodes, some without parent, of score -inf, fill up the width.
    Raises ConfigurationError for another kind of draft or taps of other layers.
    """
    if not isinstance(draft, Eagle3):
        raise ConfigurationError(f'draft {draft.cfg.name} is of kind {draft.cfg.kind}: branches '
                                 'need an eagle3 draft, a block gives the tree of its marginals')
    check_taps(draft, taps)
    device, nodes = target.device, shape.nodes
    inputs = {name: torch.zeros(1, dtype=torch.int64, device=device)
              for name in ('start', 'since', 'rope_delta', 'length')}
    outputs = {name: torch.zeros(nodes, dtype=torch.int64, device=device)
               for name in ('ids', 'parents', 'depths')}
    outputs['ancestors'] = torch.zeros((nodes, nodes), dtype=torch.bool, device=device)
    outputs['scores'] = torch.zeros(nodes, device=device)
    rule = torch.full((draft.cfg.target_vocab,), _FREE, dtype=torch.int64, device=device)
    for token in ends:
        rule[token] = _END
    for token, value in follow.items():
        rule[token] = value
    rotary = RotaryRows(draft.cfg, tokens.shape[0] + shape.depth, positions)
    if kept is None:
        kept = kept_rows(draft, tokens.shape[0], max(shape.beams * (shape.depth - 1), 1))
    with torch.inference_mode():
        return TorchExecutor(_Branches(draft, tokens, taps, rotary, kept, shape, rule), inputs,
                             outputs)


@dataclass
class _Level:
    """S nodes of one depth that are about to run through the cell."""

    ids: Tensor  # (S,) int64 target ids
    features: Tensor  # (S, H), the outputs of their parents' slots
    scores: Tensor  # (S,) joint log q
    offers: Tensor  # (S,) int64, their places among the offers
    seen: Tensor  # (S, S * (depth - 1)) bool, which temporary rows are their ancestors'


class _Branches(ChainStage):
    """EAGLE-3: a level of branches at a time."""

    def __init__(self, draft: Eagle3, tokens: Tensor, taps: TapBuffer, rotary: RotaryRows,
                 kept: Tensor, shape: TreeShape, rule: Tensor) -> None:
        super().__init__(draft, tokens, taps, rotary, kept)
        device, self.rule = tokens.device, rule
        self.nodes, self.depth = shape.nodes, shape.depth
        self.beams = beams = min(shape.beams, self.head.used)
        self.logits = torch.full((beams, draft.cfg.head_rows), float('-inf'), device=device)
        self.certain = torch.full((beams,), float('-inf'), device=device)
        self.certain[0] = 0.0
        self.own = torch.eye(beams, dtype=torch.bool, device=device)
        # all offers: the anchor, the first level, beams * beams of each level behind it
        self.sizes = [1, beams, *[beams * beams] * (shape.depth - 1)]
        count = max(sum(self.sizes), shape.nodes)
        self.scores = torch.full((count,), float('-inf'), device=device)
        self.scores[0] = 0.0
        self.ids = torch.zeros(count, dtype=torch.int64, device=device)
        self.parents = torch.zeros(count, dtype=torch.int64, device=device)
        self.depths = torch.zeros(count, dtype=torch.int64, device=device)
        self.depths[:sum(self.sizes)] = torch.arange(
            shape.depth + 1, device=device).repeat_interleave(
                torch.tensor(self.sizes, device=device))

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        p, low, first = self.begin(inputs)
        anchor = self.tokens[p:p + 1]
        self.ids[:1] = anchor
        x = self.open(p, low, first)
        scores, ids = self._children(x, anchor)
        self._offer(1, scores, ids, torch.zeros(1, dtype=torch.int64, device=ids.device))
        beams, rows = self.beams, self.beams * (self.depth - 1)
        level = _Level(ids[0], x.expand(beams, -1), scores[0],
                       torch.arange(1, 1 + beams, device=ids.device),
                       torch.zeros((beams, rows), dtype=torch.bool, device=ids.device))
        for depth in range(1, self.depth):
            level = self._expand(level, depth, p, low)
        keep(self.scores, self.ids, self.parents, self.depths, outputs)

    def _expand(self, level: _Level, depth: int, p: int, low: int) -> _Level:
        """Run the nodes of one depth, note what they offer and return the next level."""
        beams, last = self.beams, depth * self.beams
        row, slot = p + last - beams, p - 1 + depth
        self.lay(level.ids, level.features, row, self.rotary.turns[slot:slot + 1])
        level.seen[:, last - beams:last] = self.own
        context = self.own.new_ones((beams, p - low))
        mixed = self.attn.attend(self.slots[low:row + beams], beams,
                                 torch.cat((context, level.seen[:, :last]), dim=1))
        x = self.finish(level.features, mixed)
        scores, ids = self._children(x, level.ids)
        scores = scores + level.scores[:, None]
        start = sum(self.sizes[:depth + 1])
        self._offer(start, scores, ids, level.offers)
        best = scores.flatten().topk(beams)
        parent = best.indices // beams
        return _Level(ids.flatten()[best.indices], x[parent], best.values, start + best.indices,
                      level.seen[parent])

    def _children(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log q and target ids (rows, S) behind outputs x (rows, H) of tokens (rows,)."""
        logits = self.head.fill(x, self.logits[:len(x)])
        scores, index = logits.log_softmax(dim=-1).topk(self.beams)
        ids = index if self.head.ids is None else self.head.ids[index]
        rule = self.rule[tokens][:, None]
        scores = torch.where(rule == _FREE, scores, self.certain)
        scores = scores.masked_fill(rule == _END, float('-inf'))
        return scores, torch.where(rule < 0, ids, rule)

    def _offer(self, start: int, scores: Tensor, ids: Tensor, parents: Tensor) -> None:
        """Note children (rows, S) of the offers `parents` (rows,) from place `start` on."""
        part = slice(start, start + scores.numel())
        self.scores[part] = scores.flatten()
        self.ids[part] = ids.flatten()
        self.parents[part] = parents.repeat_interleave(self.beams)


def keep(scores: Tensor, ids: Tensor, parents: Tensor, depths: Tensor,
         outputs: Mapping[str, Tensor]) -> None:
    """
    Fill the outputs with the N best of C >= N offers, in the order of the offers.

    scores: (C,) joint log q, -inf for what cannot be said; ids, parents, depths: (C,) int64,
    parents before children, offer 0 the anchor. Of equal scores the earlier offer wins, which
    keeps a parent before its certain child.
    """
    count, nodes = len(scores), len(outputs['ids'])
    best = scores.sort(descending=True, stable=True)
    offers = best.indices[:nodes].masked_fill(best.values[:nodes].isneginf(), count)
    offers = offers.sort().values  # fillers, whose number is C, come last
    real = offers < count
    at = offers.clamp(max=count - 1)
    place = torch.zeros(count + 1, dtype=torch.int64, device=ids.device)
    place[offers] = torch.arange(nodes, device=ids.device)
    linked = real & (offers > 0)
    chosen = place[parents[at]]
    outputs['scores'].copy_(scores[at].where(real, float('-inf')))
    outputs['ids'].copy_(ids[at].where(real, 0))
    outputs['depths'].copy_(depths[at].where(real, 0))
    outputs['parents'].copy_(chosen.where(linked, -1))
    # I + P reaches one step up; squaring doubles the reach, and N - 1 steps are the most
    reach = torch.eye(nodes, device=ids.device)
    reach[torch.arange(nodes, device=ids.device), chosen] += linked
    for _ in range(nodes.bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    outputs['ancestors'].copy_(reach > 0.5)
