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
How long AutoVLA takes to answer: words and actions in one decoding, with and without a draft.

Random weights of the profile's shapes and forced accepted lengths: the target's own greedy
answer is proposed, right as often as the length says. The draft runs and every proposal is
verified. Prefill and verify are the PyTorch executors under the host's loop, not CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rspec_planner.decode.loop import decode
from rspec_planner.engine.torch_executor import TorchExecutor
from rspec_planner.errors import ConfigurationError
from rspec_planner.evaluate.autovla_profiles import autovla_profile
from rspec_planner.evaluate.bench import hardware, percentiles
from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_config import AutoVlaConfig
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, Draft, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.planner.autovla import Speaker
from rspec_planner.planner.autovla_prompt import video_positions
from rspec_planner.planner.prompt import Prompt

#: text tokens of a prompt besides the videos, about what the published wording has
RUNS = (280, 25, 25, 60)
DRAFTS = {'dflash flat': ('dflash', 'flat'), 'dflash mirror': ('dflash', 'mirror'),
          'eagle3 flat': ('eagle3', 'flat')}
GAIN = 3.0


def random_autovla(cfg: AutoVlaConfig, device: torch.device, dtype: torch.dtype,
                   seed: int = 0) -> AutoVla:
    """
    Return a packed target whose weights are drawn on the device in `dtype`.

    The decoder's matrices are large: the head is the embedding, so a residual stream that the
    layers hardly change would repeat its last token for ever.
    """
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            target = AutoVla(cfg)
    finally:
        torch.set_default_dtype(before)
    for weight in target.text.layers.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=GAIN * weight.shape[1] ** -0.5)
    return target.eval().requires_grad_(False).pack()


def random_draft(target: AutoVla, kind: str, rotary: str, block: int) -> Draft:
    """Return a bound draft with random weights: its own two layers or EAGLE-3's one, window 8."""
    cfg, model = target.cfg, Dflash if kind == 'dflash' else Eagle3
    make = dflash_config if kind == 'dflash' else eagle3_config
    rows = min(4096, cfg.tokens.num_actions + 2048, cfg.text.vocab_size)
    draft: Draft = model(make(cfg, rotary=rotary, block=block, draft_vocab=rows))
    draft = draft.to(target.device, target.dtype).eval().requires_grad_(False)
    draft.bind(target.text, cfg.tokens)
    draft.set_vocabulary(torch.arange(cfg.text.vocab_size - rows, cfg.text.vocab_size))
    return draft


def random_prompt(cfg: AutoVlaConfig, seed: int) -> Prompt:
    """Return a prompt of the profile's layout with random words."""
    scale = 1 if cfg.name == 'autovla' else 8
    runs = [max(count // scale, 2) for count in RUNS[:len(cfg.video.names)] + RUNS[-1:]]
    positions, delta = video_positions(cfg, runs)
    generator = torch.Generator().manual_seed(seed)
    video = [cfg.tokens.video_pad] * (cfg.slots * cfg.tokens_per_image)
    low, high = cfg.tokens.video_pad + 1, cfg.tokens.action_start
    ids: list[int] = []
    for index, count in enumerate(runs):
        ids += video if index else []
        ids += torch.randint(low, high, (count,), generator=generator).tolist()
    return Prompt(torch.tensor(ids).numpy(), positions, delta, len(ids))


def lengths_of(tokens: int, length: float, block: int) -> list[int]:
    """Return how many tokens each iteration commits behind the first, `length` on average."""
    rounds = max(round((tokens - 1) / length), -(-(tokens - 1) // block), 1)
    even, more = divmod(tokens - 1, rounds)
    return [even + (index < more) for index in range(rounds)]


@dataclass
class Way:
    """One way of answering and its times in milliseconds."""

    speaker: Speaker
    schedule: Sequence[int] = ()
    times: list[float] = field(default_factory=list)
    iterations: int = 0
    tokens: int = 0
    mismatches: int = 0

    def decode(self, prompt: Prompt, text: Sequence[int], limit: int) -> tuple[int, ...]:
        """Answer a prompt; `text` is proposed, and what must be said (if any)."""
        speaker = self.speaker
        draft = speaker.draft
        if draft is not None:
            draft = _scripted(draft, text, self.schedule, prompt.length)
        speaker.read(prompt)
        _wait(speaker.target.device)
        started = perf_counter()
        stats = decode(speaker.verify, speaker.state, (), limit, draft)
        _wait(speaker.target.device)
        self.times.append(1e3 * (perf_counter() - started))
        said = speaker.state.generated
        self.iterations += len(stats.committed)
        self.tokens += sum(stats.committed)
        self.mismatches += bool(text) and said != tuple(text)
        return said

    def report(self) -> dict[str, Any]:
        """Return percentiles, the accepted length and differences from the reference."""
        return {**percentiles(self.times),
                'accepted_length': round(self.tokens / max(self.iterations, 1), 3),
                'token_mismatches': self.mismatches}


def _scripted(draft: Any, text: Sequence[int], schedule: Sequence[int],
              length: int) -> TorchExecutor:
    """Return the draft with its proposals overwritten, right as often as the schedule says."""
    left = iter(schedule)

    def body(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        draft.enqueue()
        first, right = int(inputs['start']) - length + 1, next(left) - 1
        row = [text[first + k] if k < right and first + k < len(text) else 0
               for k in range(len(outputs['proposals']))]
        outputs['proposals'].copy_(torch.tensor(row))

    return TorchExecutor(body, draft.inputs, draft.outputs)


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize()


def _timed(device: torch.device, body: Any, repeats: int) -> dict[str, float]:
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        started = perf_counter()
        body()
        _wait(device)
        times.append(1e3 * (perf_counter() - started))
    return percentiles(times[1:])


def bench_autovla(profile: str = 'autovla-tiny', device: str = 'cpu', frames: int = 5, *,
                  lengths: Sequence[float] = (4.6, 7.4), block: int = 16,
                  tokens: int = 64) -> dict[str, Any]:
    """
    Time an answer of `tokens` tokens; every key in milliseconds unless it says otherwise.

    The answer of every frame comes from the same wide verify with proposals that are wrong, and
    all ways must say the same. One token a forward is compared as well and counted apart: in bf16
    a product of another shape may round a near tie the other way. ConfigurationError for
    impossible options.
    """
    if frames < 1 or tokens < 2 or block < 2 or any(length < 1 for length in lengths):
        raise ConfigurationError(f'frames {frames}, tokens {tokens}, block {block}, lengths '
                                 f'{tuple(lengths)}: use at least 1, 2, 2 and 1')
    place, cfg = torch.device(device), autovla_profile(profile)
    target = random_autovla(cfg, place,
                            torch.bfloat16 if place.type == 'cuda' else torch.float32)
    rows = random_prompt(cfg, 0).length
    plain = Speaker(target, prompt_rows=rows, budget=tokens, stop_ids=())
    drafts = {name: random_draft(target, *kind, block) for name, kind in DRAFTS.items()}
    ways = {f'{name}, L={length:g}': Way(
        Speaker(target, prompt_rows=rows, draft=draft, budget=tokens, stop_ids=()),
        lengths_of(tokens, length, block)) for name, draft in drafts.items()
        for length in lengths}
    one, wide = Way(plain), Way(next(iter(ways.values())).speaker, (1,) * tokens)
    video = cfg.video
    seen = torch.randint(256, (cfg.num_images, cfg.vision.temporal_patch_size, video.height,
                               video.width, 3), dtype=torch.uint8)
    with torch.inference_mode():
        for way in (one, *ways.values()):
            way.speaker.see(seen)
        for index in range(frames + 1):
            prompt = random_prompt(cfg, index)
            text = wide.decode(prompt, (), tokens)
            for way in (one, *ways.values()):
                way.decode(prompt, text, tokens)
            if not index:  # the first one warms up
                for way in (one, *ways.values()):
                    way.times.clear()
        parts = {'vision_ms': _timed(place, lambda: plain.see(seen), frames),
                 'prefill_ms': _timed(place, plain.prefill.enqueue, frames),
                 'target_step_ms': _timed(place, plain.verify.enqueue, frames)}
    reports = {name: way.report() for name, way in {'one token': one, **ways}.items()}
    base = reports['one token']['p50']
    return {'profile': profile, 'device': device, 'hardware': hardware(place),
            'torch': torch.__version__, 'weights': 'random', 'accepted_lengths': 'forced',
            'loop': 'host', 'precision': str(target.dtype).split('.')[-1], 'frames': frames,
            'parameters': target.num_parameters(), 'prompt_tokens': rows,
            'answer_tokens': tokens, **parts, 'ways': reports,
            'speedup_vs_one_token': {name: round(base / way['p50'], 2)
                                     for name, way in reports.items()},
            'token_mismatches': sum(way.mismatches for way in ways.values()),
            'token_mismatches_width_1': one.mismatches}
