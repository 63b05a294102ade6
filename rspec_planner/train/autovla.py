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
Train the tiny AutoVLA and its drafts on the embedded world, and compare them.

    python -m rspec_planner.train.autovla --out runs/autovla-tiny --minutes 2

Renders clips, trains the target on their answers, lets it answer greedily, trains drafts on what
it said, and reports accepted lengths and whether every draft leaves every answer as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
import json
import os
from pathlib import Path
import sys
import time
from typing import Any, cast

import numpy as np
import torch

from rspec_planner.evaluate.autovla_profiles import autovla_profile, tiny_codebook, tiny_tokenizer
from rspec_planner.model.autovla import AutoVla
from rspec_planner.model.autovla_config import AutoVlaConfig
from rspec_planner.model.codebook import ActionCodebook
from rspec_planner.model.draft import Draft
from rspec_planner.model.draft_checkpoint import save_draft, target_digest, TARGET_KEY
from rspec_planner.model.target import Target
from rspec_planner.planner.action_tokenizer import ActionTokenizer
from rspec_planner.planner.answer import Answer, path_of, read_answer
from rspec_planner.planner.autovla import Speaker
from rspec_planner.planner.prompt import Prompt
from rspec_planner.train.autovla_cache import build_cache
from rspec_planner.train.autovla_data import ends_of, Examples, render_all
from rspec_planner.train.autovla_target import save_autovla, TargetSettings, train_target
from rspec_planner.train.draft import new_draft
from rspec_planner.train.draft_data import TargetCache
from rspec_planner.train.draft_loop import DraftTrainer, on_stream
from rspec_planner.train.draft_settings import DraftSettings
from rspec_planner.world.reasoning import acceptable
from rspec_planner.world.splits import extra_spec, split_specs

#: name -> what differs from the defaults; blocks and windows are those of the paper. A window
#: inside the last text shows a mirror draft nothing that a flat one does not see: all axes advance
#: by one there. Only drafts that read the whole prompt tell the two apart.
DRAFTS: dict[str, dict[str, Any]] = {
    'dflash-window-flat': {'kind': 'dflash'},
    'dflash-all-flat': {'kind': 'dflash', 'window': 0},
    'dflash-all-mirror': {'kind': 'dflash', 'window': 0, 'rotary': 'mirror'},
    'eagle3-window-flat': {'kind': 'eagle3', 'block': 8}}
ROOM = 72  # tokens of an answer


def train_drafts(target: AutoVla, cache: TargetCache, minutes: float, epochs: float,
                 batch: int) -> tuple[dict[str, Draft], dict[str, Any]]:
    """Return every draft, trained one after the other, and its simulated accepted lengths."""
    drafts, reports = {}, {}
    for name, over in DRAFTS.items():
        settings = DraftSettings(
            epochs=epochs, minutes=minutes, batch_clips=batch,
            evaluate_epochs=max(epochs / 4, 1.0), keep_state=False,
            precision='bf16' if cache.device.type == 'cuda' else 'fp32', **over)
        as_target = cast('Target', target)
        with on_stream(cache.device):
            draft, _ = new_draft(settings, as_target, cache, cache.rows('extra'))
            trainer = DraftTrainer(draft, as_target, cache, settings, name=name)
            trainer.prepare()
            for _ in trainer.steps():
                pass
            found = trainer.lengths(cache.rows('val'))
        drafts[name] = draft.eval().requires_grad_(False)
        reports[name] = {**found.report(per_clip=False), 'steps': trainer.step,
                         'parameters': draft.num_parameters()}
    return drafts, reports


def prompt_of(examples: Examples, row: int) -> Prompt:
    """Return the prompt of one clip."""
    length = int(examples.prompts[row])
    return Prompt(examples.ids[row, :length].cpu().numpy(),
                  examples.positions[row, :, :length].cpu().numpy(), int(examples.deltas[row]),
                  length)


def compare(target: AutoVla, drafts: dict[str, Draft], examples: Examples, clips: int
            ) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Return the answers without a draft, and how those with each draft compare to them."""
    rows = int(examples.prompts.max())
    plain = Speaker(target, prompt_rows=rows, budget=ROOM)
    speakers = {name: Speaker(target, prompt_rows=rows, budget=ROOM, draft=draft)
                for name, draft in drafts.items()}
    counts = {name: {'mismatches': 0, 'tokens': 0, 'iterations': 0, 'ms': 0.0}
              for name in ('one token', *speakers)}
    answers = []
    for row in range(min(clips, len(examples))):
        prompt = prompt_of(examples, row)
        said: tuple[int, ...] = ()
        for name, speaker in {'one token': plain, **speakers}.items():
            speaker.see(examples.pairs[row])
            speaker.read(prompt)
            started = time.perf_counter()
            text, stats = speaker.say()
            count = counts[name]
            count['ms'] += 1e3 * (time.perf_counter() - started)
            said = said or text
            count['mismatches'] += text != said
            count['tokens'] += sum(stats.committed)
            count['iterations'] += len(stats.committed)
        answers.append(said)
    return answers, {name: {
        'clips': len(answers), 'mismatches': int(count['mismatches']),
        'accepted_length': round(count['tokens'] / max(count['iterations'], 1), 3),
        'ms': round(count['ms'] / max(len(answers), 1), 2)} for name, count in counts.items()}


def quality(answers: Sequence[tuple[int, ...]], examples: Examples, target: AutoVla,
            tokenizer: ActionTokenizer, codebook: ActionCodebook) -> dict[str, Any]:
    """Return how many answers are complete, say an acceptable decision, and where they lead."""
    cfg, right, apart, floor = target.cfg, 0, [], []
    faults: dict[str, int] = {}
    for said, clip in zip(answers, examples.clips):
        answer = read_answer(cfg, tokenizer, said)
        right += acceptable(clip.decision, sentence(answer))
        path, ends = path_of(answer, cfg, codebook), ends_of(clip, cfg)
        best = codebook.path(codebook.actions(ends))[codebook.steps::codebook.steps]
        floor.append(float(np.linalg.norm(best[:, :2] - ends[:, :2], axis=-1).mean()))
        if path is None:
            faults[answer.fault] = faults.get(answer.fault, 0) + 1
            continue
        found = path.poses[codebook.steps::codebook.steps, :2]
        apart.append(float(np.linalg.norm(found - ends[:, :2], axis=-1).mean()))
    return {'clips': len(answers), 'complete': len(apart), 'faults': faults,
            'decision_right': round(right / max(len(answers), 1), 3),
            'ade_m': round(float(np.mean(apart)), 3) if apart else None,
            'codebook_ade_m': round(float(np.mean(floor)), 3),
            'tokens': round(float(np.mean([len(said) for said in answers])), 1)}


def sentence(answer: Answer) -> str:
    """Return the reasoning of an answer as the embedded world writes it."""
    words = [word for word in answer.text.split() if not word.startswith('<')]
    text = ' '.join(words)
    for mark in ',.':
        text = text.replace(f' {mark}', mark)
    return text


class Laps:
    """Seconds of the parts of a run, printed as they end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def end(self, name: str) -> None:
        """Note how long the part took."""
        now = time.monotonic()
        self.seconds[name], self._since = round(now - self._since, 1), now
        print(f'{name}: {self.seconds[name]} s', file=sys.stderr, flush=True)


def run(out: Path, settings: TargetSettings, *, draft_minutes: float, draft_epochs: float,
        draft_clips: int, compared: int, workers: int, device: torch.device,
        shapes: AutoVlaConfig | None = None) -> dict[str, Any]:
    """
    Train and compare everything; write the folders and report.json, return the report.

    shapes: of the target, those of the tiny profile by default; the tokens are always its own.
    """
    tokenizer, codebook = tiny_tokenizer(), tiny_codebook()
    cfg = replace(shapes or autovla_profile('autovla-tiny'), max_answer_tokens=ROOM)
    laps = Laps()
    train = Examples.of(render_all([extra_spec(i) for i in range(settings.clips)], cfg, workers),
                        cfg, tokenizer, codebook, device, ROOM)
    val = Examples.of(render_all(split_specs('val', settings.val_clips), cfg, workers), cfg,
                      tokenizer, codebook, device, ROOM)
    laps.end('rendering')
    torch.manual_seed(settings.seed)
    target = AutoVla(cfg).to(device)
    curve = train_target(target, train, settings, device)
    save_autovla(target, out / 'target', {'settings': asdict(settings), 'loss': curve})
    laps.end('target')
    target.pack()
    subset = train.first(min(draft_clips, len(train)))
    cache = build_cache(target, subset.joined(val), ['extra'] * len(subset) + ['val'] * len(val),
                        room=ROOM)
    laps.end('answers')
    drafts, lengths = train_drafts(target, cache, draft_minutes, draft_epochs,
                                   min(64, len(subset)))
    for name, draft in drafts.items():
        save_draft(draft, out / name, {'lengths': lengths[name],
                                             TARGET_KEY: target_digest(out / 'target')})
    laps.end('drafts')
    with torch.inference_mode():
        answers, pairs = compare(target, drafts, val, compared)
    laps.end('comparison')
    report = {'profile': cfg.name, 'parameters': target.num_parameters(), 'loss': curve,
              'settings': asdict(settings), 'device': device.type, 'seconds': laps.seconds,
              'finished_share': round(float(cache.finished.float().mean()), 4),
              'quality': quality(answers, val, target, tokenizer, codebook),
              'simulated': lengths, 'loop': pairs,
              'ok': not any(pair['mismatches'] for pair in pairs.values())}
    (out / 'report.json').write_text(json.dumps(report, indent=2) + '\n', encoding='utf-8')
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the report is the last line of stdout."""
    parser = argparse.ArgumentParser(prog='python -m rspec_planner.train.autovla',
                                     description=(__doc__ or '').strip().splitlines()[0])
    parser.add_argument('--out', type=Path, default=Path('runs/autovla-tiny'))
    parser.add_argument('--clips', type=int, default=16_000)
    parser.add_argument('--val-clips', type=int, default=384)
    parser.add_argument('--minutes', type=float, default=2.0, help='of the target')
    parser.add_argument('--steps', type=int, default=6000)
    parser.add_argument('--batch', type=int, default=128)
    parser.add_argument('--draft-minutes', type=float, default=0.4, help='of each draft')
    parser.add_argument('--draft-epochs', type=float, default=20.0)
    parser.add_argument('--draft-clips', type=int, default=6000)
    parser.add_argument('--compare', type=int, default=96, help='clips decoded in every way')
    parser.add_argument('--workers', type=int, default=max(0, (os.cpu_count() or 2) - 2))
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    given = parser.parse_args(arguments)
    report = run(given.out, TargetSettings(
        clips=given.clips, val_clips=given.val_clips, minutes=given.minutes, steps=given.steps,
        batch=given.batch), draft_minutes=given.draft_minutes, draft_epochs=given.draft_epochs,
        draft_clips=given.draft_clips, compared=given.compare, workers=given.workers,
        device=torch.device(given.device))
    print(json.dumps(report))
    return 0 if report['ok'] else 1


if __name__ == '__main__':
    sys.exit(main())
