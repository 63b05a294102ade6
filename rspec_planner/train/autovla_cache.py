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
"""What the tiny AutoVLA says about clips, in the form that drafts are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.config import ProfileConfig
from rspec_planner.train.autovla_data import Examples
from rspec_planner.train.autovla_target import encode, hidden_states
from rspec_planner.train.draft_data import exact_products, TargetCache


@torch.inference_mode()
def answer_greedily(target: AutoVla, examples: Examples, index: Tensor, room: int
                    ) -> tuple[Tensor, Tensor, Tensor]:
    """
    Return ids (B, L), lengths (B,) of the answers and features of the clips `index`.

    Greedy, up to `room` tokens, the stop token included; every token is decided by a pass over
    the whole sequence, in fp32.
    """
    cfg = target.cfg
    prompts = examples.prompts[index]
    rows = torch.arange(len(index), device=index.device)
    columns = torch.arange(examples.ids.shape[1], device=index.device)
    ids = examples.ids[index].masked_fill(columns >= prompts[:, None], cfg.tokens.pad)
    features = encode(target, examples.pairs[index])
    stops = torch.tensor(cfg.tokens.stop_ids, device=index.device)
    lengths = torch.full_like(prompts, room)
    open_ = torch.ones_like(prompts, dtype=torch.bool)
    for step in range(room):
        width = int(prompts.max()) + step
        hidden = hidden_states(target, examples, index, ids[:, :width], features)
        chosen = target.text.logits(hidden[rows, prompts + step - 1]).argmax(-1)
        ids[rows[open_], (prompts + step)[open_]] = chosen[open_]
        ended = open_ & torch.isin(chosen, stops)
        lengths[ended] = step + 1
        open_ &= ~ended
        if not bool(open_.any()):
            break
    return ids, lengths, features


def build_cache(target: AutoVla, examples: Examples, splits: Sequence[str], *, room: int = 72,
                tail: int = 8, batch: int = 128) -> TargetCache:
    """
    Return the cache of all clips; splits: of each of them.

    room: most tokens of an answer, at most the columns behind the longest prompt. tail: prompt
    rows whose states are kept, the widest window of a draft.
    """
    device, layers = examples.ids.device, target.cfg.text.num_layers
    longest = int(examples.prompts.max())
    parts: list[dict[str, Tensor]] = []
    with exact_products():
        for index in torch.split(torch.arange(len(examples), device=device), batch):
            parts.append(_rows(target, examples, index, room, tail, longest, layers))
    joined = {name: torch.cat([part[name] for part in parts], dim=int(name.endswith('taps')))
              for name in parts[0]}
    lengths, layouts = torch.unique(examples.prompts, return_inverse=True)
    first = [int((layouts == layout).nonzero()[0]) for layout in range(len(lengths))]
    shifted = torch.zeros((len(lengths), 3, longest), dtype=torch.int64, device=device)
    for layout, (row, length) in enumerate(zip(first, lengths.tolist())):
        shifted[layout, :, longest - length:] = examples.positions[row, :, :length]
    return TargetCache(
        profile=cast('ProfileConfig', target.cfg), digest='',
        names=tuple(f'{clip.spec.pair_id}/{clip.spec.event}' for clip in examples.clips),
        splits=tuple(splits), families=tuple(clip.spec.family for clip in examples.clips),
        prompt_lengths=examples.prompts, layouts=layouts, layout_lengths=lengths,
        positions=shifted, rope_delta=examples.deltas[first],
        history=torch.zeros((len(lengths), 2), dtype=torch.int64, device=device),
        **cast('dict[str, Any]', joined))


@torch.inference_mode()
def _rows(target: AutoVla, examples: Examples, index: Tensor, room: int, tail: int, longest: int,
          layers: int) -> dict[str, Tensor]:
    """Return ids, lengths, prompts and states of the clips `index`, aligned as the cache is."""
    ids, lengths, features = answer_greedily(target, examples, index, room)
    prompts = examples.prompts[index]
    width = int(prompts.max()) + room
    _, taps = hidden_states(target, examples, index, ids[:, :width], features,
                            taps=tuple(range(layers)))
    answer = torch.arange(room, device=ids.device)
    said = ids.gather(1, prompts[:, None] + answer)
    said = said.masked_fill(answer >= lengths[:, None], -1)
    column = torch.arange(longest, device=ids.device) - longest + prompts[:, None]
    words = ids.gather(1, column.clamp(min=0)).masked_fill(column < 0, target.cfg.tokens.pad)
    row = prompts[:, None] - tail + torch.arange(tail + room, device=ids.device)
    held = torch.stack([tap.gather(1, row[..., None].expand(-1, -1, tap.shape[-1]))
                        for tap in taps])
    known = (column >= 0)[..., None]
    whole = torch.stack([tap.gather(1, column.clamp(min=0)[..., None].expand(
        -1, -1, tap.shape[-1])) * known for tap in taps[:-1]])
    return {'ids': said, 'lengths': lengths, 'prompt_ids': words.int(),
            'tail_taps': held.to(torch.bfloat16), 'full_taps': whole.to(torch.bfloat16)}
