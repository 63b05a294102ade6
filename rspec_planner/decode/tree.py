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
Verification of a tree of proposals instead of one chain.

Trees come from two sources. A block draft gives one distribution per position, independent of
the others: the tree of a fixed number of nodes that holds the most probable prefixes is grown
best first by cumulative log q (DDTree). EAGLE-3 can run every branch on its own, see
`engine.eagle_tree`. Either way one forward with a mask of ancestors verifies all nodes. The
accepted path is then moved to contiguous rows, and everything behind it is as after a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
import heapq
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from rspec_planner.decode.accept import Acceptance
from rspec_planner.decode.loop import check_fit, run_draft
from rspec_planner.decode.sampling import Sampler
from rspec_planner.decode.state import DecodeState, DecodeStats
from rspec_planner.engine.executor import Executor

_NO_RULE: Mapping[int, int] = {}


class Rows(Protocol):
    """What holds a row per position: the KV cache, the taps."""

    def gather(self, start: int, path: Sequence[int]) -> None:
        """Move rows start + path[i] to start + i."""


@dataclass(frozen=True)
class Tree:
    """N nodes in an order where parents come first; node 0 is the anchor."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]  # -1: the anchor, and nodes that only fill up the width
    depths: tuple[int, ...]
    ancestors: Tensor  # (N, N) bool: row i marks the path from the anchor to node i


class Trees(Protocol):
    """Where the trees of a run come from."""

    @property
    def draft(self) -> Executor:
        """Return the stage behind them."""

    def grow(self, state: DecodeState) -> Tree:
        """Return the tree behind the anchor."""


@dataclass(frozen=True)
class MarginalTrees:
    """
    Trees from the marginals of a draft with output 'logits' (B - 1, V_d), grown on the host.

    The other fields are those of `build_tree`.
    """

    draft: Executor
    budget: int
    top_k: int
    draft_ids: Tensor | None = None
    follow: Mapping[int, int] = field(default_factory=dict)
    ends: Collection[int] = ()

    def grow(self, state: DecodeState) -> Tree:
        """Return the tree behind the anchor, see `Trees`."""
        run_draft(self.draft, state)
        return build_tree(self.draft.outputs['logits'].log_softmax(-1), self.draft_ids,
                          self.budget, self.top_k, state.anchor, self.follow, self.ends)


@dataclass(frozen=True)
class BranchTrees:
    """Trees that a `branch_tree_executor` grew."""

    draft: Executor

    def grow(self, state: DecodeState) -> Tree:
        """Return the tree behind the anchor, see `Trees`."""
        run_draft(self.draft, state)
        found = self.draft.outputs
        ids, parents, depths = (tuple(found[name].tolist())
                                for name in ('ids', 'parents', 'depths'))
        return Tree(ids, parents, depths, found['ancestors'])


def build_tree(logprobs: Tensor, draft_ids: Tensor | None, budget: int, top_k: int,
               anchor: int = 0, follow: Mapping[int, int] = _NO_RULE,
               ends: Collection[int] = ()) -> Tree:
    """
    Return the tree of the `budget` most probable prefixes, the anchor counted.

    logprobs: (B - 1, V_d) log q per position; draft_ids: (V_d,) target ids of its columns, None
    when they are the target's own; top_k: the most siblings. Behind a key of `follow` only its
    value is proposed, with certainty; behind an id of `ends` nothing is. Where there are fewer
    prefixes, nodes that no choice can reach fill up the width.
    """
    values, index = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
    tokens = (index if draft_ids is None else draft_ids[index]).tolist()
    scores = values.tolist()
    ids, parents, depths, totals = [anchor], [-1], [0], [0.0]
    heap: list[tuple[float, int, int, int]] = []  # minus cumulative log q, parent, rank, id

    def offer(parent: int, rank: int) -> None:
        """Queue the child of this rank, if the draft has one."""
        depth = depths[parent]
        if depth == len(scores) or ids[parent] in ends:
            return
        if ids[parent] in follow:
            if rank == 0:
                heapq.heappush(heap, (-totals[parent], parent, 0, follow[ids[parent]]))
        elif rank < len(scores[depth]) and scores[depth][rank] > float('-inf'):
            total = totals[parent] + scores[depth][rank]
            heapq.heappush(heap, (-total, parent, rank, tokens[depth][rank]))

    offer(0, 0)
    while heap and len(ids) < budget:
        cost, parent, rank, token = heapq.heappop(heap)
        ids.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        totals.append(-cost)
        offer(parent, rank + 1)
        offer(len(ids) - 1, 0)
    missing = budget - len(ids)
    parents += [-1] * missing
    return Tree((*ids, *[0] * missing), tuple(parents), (*depths, *[0] * missing),
                _ancestors(parents))


def _ancestors(parents: Sequence[int]) -> Tensor:
    """Return (N, N) bool of who sees whom, each node itself included."""
    rows: list[list[int]] = []
    for node, parent in enumerate(parents):
        rows.append([*(rows[parent] if parent >= 0 else []), node])
    seen = torch.zeros((len(parents), len(parents)), dtype=torch.bool)
    who = torch.tensor([node for node, row in enumerate(rows) for _ in row])
    seen[who, torch.tensor([node for row in rows for node in row])] = True
    return seen


def accept_tree(tree: Tree, best: Sequence[int], stop_ids: Collection[int],
                limit: int) -> tuple[Acceptance, tuple[int, ...]]:
    """
    Walk from the anchor along the target's choices; return what is committed and the path.

    best: (N,) the choice behind every node; stop_ids, limit: as in `accept`. path: nodes whose
    rows are valid, the anchor first; the bonus token has no node.
    """
    child = {(parent, token): node
             for node, (parent, token) in enumerate(zip(tree.parents, tree.ids))}
    path, committed = [0], []
    while True:
        choice = best[path[-1]]
        committed.append(choice)
        node = child.get((path[-1], choice))
        if node is not None:
            path.append(node)
        if node is None or choice in stop_ids or len(committed) == limit:
            break
    return Acceptance(tuple(committed), committed[-1] in stop_ids, len(path) - 1), tuple(path)


def decode_tree(verify: Executor, state: DecodeState, stop_ids: Collection[int], max_tokens: int,
                trees: Trees, rows: Sequence[Rows],
                sampler: Sampler | None = None) -> DecodeStats:
    """
    Generate like `loop.decode`, with a tree in every verify.

    verify: a `tree_verify_executor`, whose width is the number of nodes of `trees`. rows: the
    target's KV cache and, if a draft reads taps, their buffer. A sampler's match rule is exact
    here too; its rejection rule is not used. `close` needs a verify of chains.
    """
    inputs = verify.inputs
    check_fit(inputs['ids'].shape[0], trees.draft, state, max_tokens)
    reused = state.num_generated - 1
    committed: list[int] = []
    draft_ms = verify_ms = 0.0
    while not state.done and state.num_generated < max_tokens:
        started = perf_counter()
        tree = trees.grow(state)
        inputs['ids'].copy_(torch.tensor(tree.ids))
        inputs['depths'].copy_(torch.tensor(tree.depths))
        inputs['ancestors'].copy_(tree.ancestors)
        drafted = perf_counter()
        inputs['start'].fill_(state.p)
        verify.enqueue()
        best = verify.outputs['best'].tolist() if sampler is None else \
            sampler.draw(verify.outputs['logits'], inputs['depths'] + (state.p + 1))
        taken, path = accept_tree(tree, best, stop_ids, max_tokens - state.num_generated)
        for part in rows:
            part.gather(state.p, path)
        state.since = state.p
        state.commit(taken)
        committed.append(len(taken.committed))
        draft_ms += 1e3 * (drafted - started)
        verify_ms += 1e3 * (perf_counter() - drafted)
    return DecodeStats(len(committed), tuple(committed), draft_ms, verify_ms, reused)
