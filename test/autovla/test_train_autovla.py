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
"""A small AutoVLA learns a handful of clips by heart; drafts learn what it says."""

from dataclasses import replace
import json

import numpy as np
import pytest
import torch

from rspec_planner.evaluate.autovla_profiles import (
    autovla_profile,
    tiny_codebook,
    tiny_tokenizer,
)
from rspec_planner.model.autovla_config import VideoConfig
from rspec_planner.planner.answer import read_answer
from rspec_planner.planner.autovla import Speaker
from rspec_planner.train.autovla import DRAFTS, prompt_of, ROOM, run, sentence
from rspec_planner.train.autovla_cache import answer_greedily, build_cache
from rspec_planner.train.autovla_data import answer_ids, ends_of, Examples, IGNORED, render
from rspec_planner.train.autovla_target import (
    answer_loss,
    hidden_states,
    load_saved,
    TargetSettings,
)
from rspec_planner.world.splits import extra_spec


def small():
    """Return a profile that a CPU trains in seconds."""
    cfg = autovla_profile('autovla-tiny')
    text = replace(cfg.text, hidden_size=64, num_layers=2, num_heads=4, head_dim=16,
                   num_kv_heads=2, intermediate_size=128, mrope_section=(2, 3, 3))
    vision = replace(cfg.vision, hidden_size=32, depth=2, num_heads=2, intermediate_size=64,
                     out_hidden_size=64, full_attention_layers=(1,))
    return replace(cfg, text=text, vision=vision, video=VideoConfig(height=56, width=112))


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp('autovla')
    torch.manual_seed(0)
    report = run(out, TargetSettings(clips=4, val_clips=2, batch=4, steps=140, minutes=9.0,
                                     learning_rate=1e-2, muon_learning_rate=0.03,
                                     ema_decay=0.9),
                 draft_minutes=0.0, draft_epochs=24.0, draft_clips=4, compared=2, workers=0,
                 device=torch.device('cpu'), shapes=small())
    return out, report


@pytest.fixture(scope='module')
def examples():
    cfg = small()
    clips = [item for pair in (0, 2) for item in render(extra_spec(pair), cfg)]
    return Examples.of(clips, cfg, tiny_tokenizer(), tiny_codebook(), torch.device('cpu'), ROOM)


def test_an_answer_teaches_the_reasoning_and_the_nearest_actions(examples):
    cfg, tokenizer, codebook = small(), tiny_tokenizer(), tiny_codebook()
    for row, clip in enumerate(examples.clips):
        ids = answer_ids(clip, cfg, tokenizer, codebook)
        assert tokenizer.encode('<unk>')[0] not in ids
        answer = read_answer(cfg, tokenizer, ids)
        assert answer.fault == '' and sentence(answer) == clip.reasoning
        labels = examples.labels[row]
        assert labels[labels != IGNORED].tolist() == ids
        start = int(examples.prompts[row])
        assert examples.ids[row, start:start + len(ids)].tolist() == ids
        path = codebook.path(answer.actions)[codebook.steps::codebook.steps]
        assert np.linalg.norm(path[:, :2] - ends_of(clip, cfg)[:, :2], axis=-1).max() < 1.5


def test_videos_are_half_a_second_apart_and_end_at_t0(examples):
    cfg = small()
    from rspec_planner.train.autovla_data import _renderer
    from rspec_planner.world.generate import generate_pair
    still = generate_pair(extra_spec(0), _renderer(cfg.video.width, cfg.video.height))[0]
    assert np.array_equal(examples.pairs[0].numpy()[1, 1], still.images[1, 3])  # front_wide, t0
    assert np.array_equal(examples.pairs[0].numpy()[3, 1], still.images[0, 3])  # cross_left
    assert examples.pairs.shape == (4, 6, 2, 56, 112, 3)


@torch.inference_mode()
def test_it_learns_and_says_whole_answers(trained, examples):
    """Twins differ in a few pixels; which of the two a clip is may stay open after 140 steps."""
    out, report = trained
    target, every = load_saved(out / 'target'), torch.arange(4)
    assert report['loss'][0] > 1.0 and report['finished_share'] > 0.6
    assert float(answer_loss(target, examples, every)) < 0.3
    hidden = hidden_states(target, examples, every, examples.ids[:, :-1])
    wanted = examples.labels[:, 1:]
    kept = wanted != IGNORED
    right = target.text.logits(hidden[kept]).argmax(-1) == wanted[kept]
    assert float(right.float().mean()) > 0.9
    ids, lengths, _ = answer_greedily(target, examples, every, ROOM)
    for row in range(4):
        start = int(examples.prompts[row])
        said = ids[row, start:start + int(lengths[row])].tolist()
        answer = read_answer(target.cfg, tiny_tokenizer(), said)
        assert answer.fault == '' and len(answer.actions) == 10


def test_every_draft_leaves_the_trained_answers_as_they_are(trained):
    out, report = trained
    assert report['ok'] and set(report['loop']) == {'one token', *DRAFTS}
    assert json.loads((out / 'report.json').read_text()) == report
    for name in DRAFTS:
        assert report['loop'][name]['mismatches'] == 0
        assert report['simulated'][name]['L'] >= 1.0
        assert (out / name / 'config.json').is_file()
    assert max(report['loop'][name]['accepted_length'] for name in DRAFTS) > 1.05


def test_the_cache_is_what_the_target_says_and_holds(trained, examples):
    target = load_saved(trained[0] / 'target')
    cache = build_cache(target, examples, ['extra'] * 4, room=ROOM)
    longest = int(examples.prompts.max())
    for row in range(4):
        start, count = int(examples.prompts[row]), int(cache.lengths[row])
        speaker = Speaker(target, prompt_rows=longest, budget=ROOM)
        speaker.see(examples.pairs[row])
        speaker.read(prompt_of(examples, row))
        assert tuple(cache.ids[row, :count].tolist()) == speaker.say()[0]
        layout = int(cache.layouts[row])
        assert int(cache.layout_lengths[layout]) == start
        assert torch.equal(cache.positions[layout, :, longest - start:],
                           examples.positions[row, :, :start])
        assert torch.equal(cache.prompt_ids[row, longest - start:].long(),
                           examples.ids[row, :start])
        assert (cache.full_taps[:, row, :longest - start] == 0).all()
        assert torch.equal(cache.full_taps[:, row, longest - 8:], cache.tail_taps[:-1, row, :8])
    assert cache.finished.all() and cache.tail == 8
