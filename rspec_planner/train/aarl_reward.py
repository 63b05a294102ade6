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
What a plan costs when words of the reasoning change: the reward of draft samples.

The text of a clip is altered at a few positions, the target reads every altered text behind the
cached keys and values of the prompt (no vision, no prompt again), and its flow head plans from
the same noise as for the greedy text. The distance between the plans is then caused by the words
alone. Action-aware post-training of drafts: arXiv 2606.31160.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rspec_planner.model.action import ExpertContext
from rspec_planner.model.config import TokenIds
from rspec_planner.model.flow import euler_sample, start_noise
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache


@dataclass(frozen=True)
class MixedTexts:
    """
    K texts for each of B clips, as the expert sees them.

    ids: (B, K, S) int64, pad behind the end. rows: (B, K) int64, tokens of each text.
    """

    ids: Tensor
    rows: Tensor


def mix_texts(ids: Tensor, lengths: Tensor, at: Tensor, sampled: Tensor,
              tokens: TokenIds) -> MixedTexts:
    """
    Put sampled tokens into greedy texts.

    ids: (B, R) int64, the greedy texts, anything behind their lengths (B,). at: (B, N) int64
    text index of each replaced token, negative for none. sampled: (B, K, N) int64 target ids.

    A text ends behind its first stop token, wherever that was sampled: nothing later is read.
    Unless that token is `traj_future_start`, one is appended, as the planner does when a
    reasoning ends without it; so a text whose own last token was replaced stays well formed.
    Returns S = R + 1 columns.
    """
    batch, columns = ids.shape
    count = sampled.shape[1]
    mixed = torch.full((batch, count, columns + 2), tokens.pad, dtype=ids.dtype,
                       device=ids.device)
    mixed[:, :, :columns] = ids[:, None]
    column = torch.arange(columns + 2, device=ids.device)
    spare = torch.where(at >= 0, at, columns + 1)  # a column that nobody reads
    mixed.scatter_(2, spare[:, None].expand(-1, count, -1), sampled)
    inside = column < lengths[:, None, None]
    stops = torch.isin(mixed, torch.tensor(tokens.stop_ids, device=ids.device)) & inside
    first = torch.where(stops, column, columns + 1).amin(-1)
    rows = torch.minimum(first + 1, lengths[:, None].expand_as(first))
    last = mixed.gather(2, (rows - 1)[..., None])[..., 0]
    open_end = last != tokens.traj_future_start
    end = (column == rows[..., None]) & open_end[..., None]
    mixed = torch.where(end, tokens.traj_future_start, mixed)
    rows = rows + open_end
    mixed = torch.where(column < rows[..., None], mixed, tokens.pad)
    return MixedTexts(mixed[:, :, :columns + 1], rows)


@dataclass(frozen=True)
class Prefix:
    """
    What the target knows before the reasoning begins, for B clips.

    rows: (B, L, 2, kv_heads, P, d) keys and values of the prompt, left-aligned.
    lengths: (B,) int64 valid rows. rope_delta: (B,) int64, position of row i is i + rope_delta
    behind the prompt.
    """

    rows: Tensor
    lengths: Tensor
    rope_delta: Tensor


class TextPlanner:
    """The plans of one target for altered texts; it never sees the images again."""

    def __init__(self, target: Target, flow_steps: int | None = None) -> None:
        self.target, self.cfg = target, target.cfg
        self.flow_steps = flow_steps or target.cfg.flow.num_steps

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables of text positions (B, S)."""
        text = self.cfg.text
        return mrope_cos_sin(positions[:, None].expand(-1, 3, -1), text.head_dim,
                             text.rope_theta, text.mrope_section)

    @torch.no_grad()
    def text_rows(self, prefix: Prefix, texts: MixedTexts) -> tuple[Tensor, Tensor]:
        """
        Return the keys and values of all texts, (L, B, K, kv_heads, S, d) each.

        The K texts of a clip run packed behind one copy of its prompt: a row sees the prompt
        and the rows of its own text up to itself.
        """
        batch, count, columns = texts.ids.shape
        width, device = prefix.rows.shape[4], texts.ids.device
        text, dtype = self.target.text, self.target.dtype
        cache = KVCache(self.cfg.text, batch, width + count * columns, dtype, device)
        cache.keys[:, :, :, :width] = prefix.rows[:, :, 0].transpose(0, 1)
        cache.values[:, :, :, :width] = prefix.rows[:, :, 1].transpose(0, 1)
        step = torch.arange(columns, device=device)
        positions = (prefix.lengths + prefix.rope_delta)[:, None] + step
        cos, sin = self._rotary(positions.repeat(1, count))
        own = torch.kron(torch.eye(count, device=device),
                         torch.ones((columns, columns), device=device).tril())
        known = torch.arange(width, device=device) < prefix.lengths[:, None, None]
        seen = torch.cat((known.expand(-1, count * columns, -1),
                          own.bool().expand(batch, -1, -1)), dim=2)
        text(text.embed(texts.ids.flatten(1)), cos, sin, cache=cache, start=width,
             attn_mask=seen[:, None], last_rows=1)
        shape = (*cache.keys.shape[:3], count, columns, -1)
        keys, values = (buffer[:, :, :, width:].reshape(shape).transpose(2, 3)
                        for buffer in (cache.keys, cache.values))
        return keys, values

    @torch.no_grad()
    def plans(self, prefix: Prefix, texts: MixedTexts, noise: Tensor) -> Tensor:
        """
        Return normalised actions (B, K, D, W, 2) fp32.

        noise: (B, D, W, 2) fp32 standard normal; draw j starts the flow of every text of a clip.
        """
        batch, count, columns = texts.ids.shape
        draws, device = noise.shape[1], noise.device
        own = self.text_rows(prefix, texts)
        width, each = prefix.rows.shape[4], count * draws
        context = [self._context(prefix.rows[:, :, part].transpose(0, 1), own[part], draws)
                   for part in (0, 1)]
        known = torch.arange(width, device=device) < prefix.lengths[:, None]
        said = torch.arange(columns, device=device) < texts.rows.flatten()[:, None]
        visible = torch.cat((known.repeat_interleave(count, 0), said), dim=1)
        first = (prefix.lengths + prefix.rope_delta)[:, None] + texts.rows
        step = torch.arange(noise.shape[2], device=device)
        cos, sin = self._rotary(first.repeat_interleave(draws, 1).view(-1, 1) + step)
        expert = self.target.expert
        laid: ExpertContext = expert.prepare(context[0], context[1],
                                             visible.repeat_interleave(draws, 0))
        begun = start_noise(noise, self.cfg.flow.noise_scale)[:, None]
        start = begun.expand(-1, count, -1, -1, -1).reshape(batch * each, -1, 2)
        actions = euler_sample(lambda x, t: expert.velocity(x, t, laid, cos, sin),
                               start, self.flow_steps)
        return actions.view(batch, count, *noise.shape[1:])

    def _context(self, prompt: Tensor, own: Tensor, draws: int) -> Tensor:
        """Return (L, B * K * D, kv_heads, P + S, d) of prompt rows and own rows."""
        layers, batch, count = own.shape[:3]
        prompt = prompt.to(own.dtype)[:, :, None].expand(-1, -1, count, -1, -1, -1)
        joined = torch.cat((prompt, own), dim=4).flatten(1, 2)
        return joined.repeat_interleave(draws, 1)


def plan_errors(plans: Tensor, texts: MixedTexts) -> Tensor:
    """
    Return the mean squared distance of each plan to that of the first text, (B, K - 1) fp32.

    plans: (B, K, D, W, 2) normalised actions, compared draw by draw and averaged. A text equal
    to the first one costs exactly 0: what rounding leaves between equal rows of a batch is no
    reward.
    """
    error = (plans[:, 1:] - plans[:, :1]).float().square().mean((2, 3, 4))
    same = (texts.ids[:, 1:] == texts.ids[:, :1]).all(-1)
    return error.masked_fill(same, 0.0)
