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
One draft, other forms of its proposals under a budget of nodes: longer chains and trees.

A block draft gives its marginals alone, so its trees come from them. EAGLE-3 also runs every
branch on its own, and as far as it is asked to: at each budget its chain, the tree of the
chain's marginals and the tree of branches are compared, all with the same reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from rspec_planner.decode.loop import close
from rspec_planner.decode.reuse import start_from_guess
from rspec_planner.decode.tree import BranchTrees, decode_tree, MarginalTrees, Rows, Trees
from rspec_planner.engine.eagle_tree import branch_tree_executor, TreeShape
from rspec_planner.engine.executor import Executor
from rspec_planner.engine.torch_executor import tree_verify_executor
from rspec_planner.evaluate.reasoning_runs import Contender, Frame, LoopContender, Run, Stand
from rspec_planner.model.draft import Draft, DraftConfig
from rspec_planner.planner.reasoner import Reasoner

CHAIN, MARGINAL, BRANCH = 'chain', 'tree', 'branch'
#: the longest chain and the deepest EAGLE-3 tree, anchor included: few texts have more tokens
REACH = 32
#: the most children of a node in a tree of marginals; beams of a tree of branches
SIBLINGS, BEAMS = 4, 8


@dataclass(frozen=True)
class Variant:
    """One draft under another form and budget."""

    base: str  # name of the draft
    form: str  # CHAIN, MARGINAL or BRANCH
    nodes: int  # width of the verify, the anchor counted
    block: int  # the longest path, the anchor counted

    @property
    def name(self) -> str:
        """Return what the variant is called in tables."""
        return f'{self.base}+{self.form}{self.nodes}'


def variants(drafts: Mapping[str, DraftConfig], budgets: Sequence[int]) -> list[Variant]:
    """
    Return what the first block draft and the first EAGLE-3 draft are compared with themselves.

    A corrected block gives no marginals: its offsets depend on the choices before. A chain of
    the draft's own width is the draft itself, and none is longer than REACH.
    """
    block = next((name for name, cfg in drafts.items()
                  if cfg.kind == 'dflash' and not cfg.correction_rank), None)
    chain = next((name for name, cfg in drafts.items() if cfg.kind == 'eagle3'), None)
    found = [] if block is None else [Variant(block, MARGINAL, nodes, drafts[block].block)
                                      for nodes in budgets]
    if chain is not None:
        widths = dict.fromkeys(min(nodes, REACH) for nodes in budgets)
        found += [Variant(chain, CHAIN, width, width) for width in widths
                  if width != drafts[chain].block]
        found += [Variant(chain, form, nodes, min(nodes, REACH)) for nodes in budgets
                  for form in (MARGINAL, BRANCH)]
    return found


def variant_pairs(found: Sequence[Variant],
                  drafts: Mapping[str, DraftConfig]) -> list[tuple[str, str]]:
    """Return what is compared: trees with the chain of their reach, branches with marginals."""
    pairs = []
    for variant in found:
        if variant.form == CHAIN:
            continue
        own = drafts[variant.base].block == variant.block
        pairs.append((variant.name, variant.base if own else
                      Variant(variant.base, CHAIN, variant.block, variant.block).name))
        if variant.form == BRANCH:
            pairs.append((variant.name, replace(variant, form=MARGINAL).name))
    return pairs


def with_block(draft: Draft, block: int) -> Draft:
    """Return the same weights proposing another number of tokens; EAGLE-3 alone can do that."""
    other = copy(draft)
    other.cfg = replace(draft.cfg, block=block)
    return other


def variant_contender(stand: Stand, variant: Variant) -> Contender:
    """Return the reasoner of a variant over the stand's cache."""
    draft = stand.drafts[variant.base]
    if draft.cfg.block != variant.block:
        draft = with_block(draft, variant.block)
    taps, stops = stand.taps[draft.cfg.taps], stand.cfg.tokens.stop_ids
    reasoner = Reasoner(stand.target, stand.cache, budget=stand.budget, draft=draft, taps=taps,
                        positions=stand.positions)
    if variant.form == CHAIN:
        return LoopContender(variant.name, stand, reasoner)
    assert reasoner.draft is not None
    follow = {stand.cfg.tokens.cot_end: stand.cfg.tokens.traj_future_start}
    trees: Trees = MarginalTrees(reasoner.draft, variant.nodes, SIBLINGS, draft.draft_ids,
                                 follow, stops)
    if variant.form == BRANCH:
        shape = TreeShape(variant.nodes, variant.block - 1, BEAMS)
        trees = BranchTrees(branch_tree_executor(
            draft, stand.target, reasoner.state.tokens, taps, stand.positions, shape,
            follow=follow, ends=stops))
    verify = tree_verify_executor(stand.target, stand.cache, variant.nodes, taps)
    return TreeContender(variant.name, stand, reasoner, trees, verify, [stand.cache, taps])


class TreeContender:
    """A tree in every verify; the reasoner's own verify, of chains, completes the context."""

    def __init__(self, name: str, stand: Stand, reasoner: Reasoner, trees: Trees,
                 verify: Executor, rows: Sequence[Rows]) -> None:
        """Take where the trees come from and what verifies them; rows: cache and taps."""
        self.name, self._stand, self._reasoner = name, stand, reasoner
        self._trees, self._verify, self._rows = trees, verify, rows

    def reason(self, frame: Frame) -> Run:
        """Decode one frame; the clock also runs while trees grow."""
        stand, state, verify = self._stand, self._reasoner.state, self._reasoner.verify
        tokens = stand.cfg.tokens
        stand.wait()
        started = perf_counter()
        for stage in (self._verify, verify, self._trees.draft):
            stage.inputs['rope_delta'].fill_(frame.prompt.rope_delta)
        start_from_guess(stand.prefill_stage, state, torch.from_numpy(frame.prompt.token_ids),
                         (), tokens.stop_ids, stand.budget)
        stats = decode_tree(self._verify, state, tokens.stop_ids, stand.budget, self._trees,
                            self._rows)
        ids = state.generated
        length, forwards = close(verify, state, tokens.traj_future_start)
        stand.wait()
        return Run(ids, replace(stats, closing_forwards=forwards), length,
                   1e3 * (perf_counter() - started))
