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
The speculative loop over AutoVLA says what plain greedy decoding says, words and actions alike.

Many random tiny models; drafts of both kinds with a flat and with a mirrored rotary. The random
models say words and actions in any order; how often actions follow words, a stop ends an answer
and a draft is right is counted, so that an empty comparison cannot pass.
"""

from collections import Counter
import random

from autovla_reference import (
    ACTION_START,
    random_frames,
    reference_inputs,
    reference_model,
    small_autovla,
    TOKENS,
    VIDEO_PAD,
    video_prompt,
)
import numpy as np
import pytest
import torch

from rspec_planner.decode.sampling import Sampler, SamplingRule
from rspec_planner.engine.draft_executor import draft_executor
from rspec_planner.engine.torch_executor import TorchExecutor
from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, DraftRotary, eagle3_config
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.model.rope import flat_cos_sin
from rspec_planner.model.taps import TapBuffer
from rspec_planner.model.window_vision import patchify_pairs
from rspec_planner.planner.autovla import Speaker
from rspec_planner.planner.autovla_prompt import video_positions
from rspec_planner.planner.prompt import Prompt

BUDGET, ROWS = 24, 96
NEAR_TIE = 1e-3  # below it two correct orders of summation may choose differently
DRAFTS = [(kind, rotary) for kind in ('dflash', 'eagle3') for rotary in ('flat', 'mirror')]


def small_draft(target, kind, rotary, seed=0, **over):
    """A random draft of the target, bound to it."""
    make, model = (dflash_config, Dflash) if kind == 'dflash' else (eagle3_config, Eagle3)
    cfg = make(target.cfg, rotary=rotary, **{'block': 5, 'window': 6, **over})
    return model(cfg).initialise(target.text, seed).bind(target.text, TOKENS).eval()


def prompt_of(target, seed):
    ids = video_prompt(target.cfg, seed)
    text = ''.join('v' if token == VIDEO_PAD else 't' for token in ids).replace('v', ' ')
    positions, delta = video_positions(target.cfg, [len(run) for run in text.split()])
    return Prompt(np.array(ids), positions, delta, len(ids))


def steer(target, seed):
    """
    Give the decoder new weights; the answer of every model ends sooner or later.

    The residual stream keeps the last word, and a tied head would repeat it for ever; large
    layers drown it. A stop has a longer embedding than other tokens, so it is said at times.
    """
    generator = torch.Generator().manual_seed(seed)
    target.text.train().eval()  # drops the joined weights of the last model
    for name, weight in target.text.named_parameters():
        if 'embed' in name:
            weight.normal_(std=0.3, generator=generator)
            weight[TOKENS.im_end] *= 1.5
        elif weight.dim() == 2:
            weight.normal_(std=3.0 * weight.shape[1] ** -0.5, generator=generator)
        elif name.endswith('bias'):
            weight.normal_(std=0.3, generator=generator)
        else:
            weight.uniform_(0.5, 1.5, generator=generator)
    if seed % 2:
        target.pack()


def plain_greedy(target, prompt, seed):
    """Return the answer of a loop without any cache, and the smallest lead of a winner."""
    cfg = target.cfg
    features = target.vision(patchify_pairs(random_frames(cfg, seed)), cfg.patch_grid)
    ids, lead = prompt.token_ids.tolist(), float('inf')
    while len(ids) < prompt.length + BUDGET and (
            len(ids) == prompt.length or ids[-1] not in TOKENS.stop_ids):
        tokens = torch.tensor([ids])
        hidden = target.text.embed(tokens)
        visual = (tokens == VIDEO_PAD) & (torch.arange(len(ids)) < prompt.length)
        hidden = hidden.masked_scatter(visual[..., None], features)
        behind = np.arange(prompt.length, len(ids)) + prompt.rope_delta
        positions = np.concatenate([prompt.positions, np.broadcast_to(behind, (3, len(behind)))],
                                   axis=1)
        cos, sin = DraftRotary.tables(dflash_config(cfg, rotary='mirror'), tokens[0],
                                      torch.from_numpy(positions))
        top = target.text.logits(target.text(hidden, cos, sin)[0, -1]).topk(2)
        lead = min(lead, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return tuple(ids[prompt.length:]), lead


def spoken(target, prompt, seed, draft=None):
    speaker = Speaker(target, prompt_rows=ROWS, draft=draft, budget=BUDGET)
    speaker.see(random_frames(target.cfg, seed))
    speaker.read(prompt)
    return speaker.say()


@pytest.fixture(scope='module')
def cases():
    """Models whose greedy answer has no near tie: seed, prompt, answer."""
    target, found = small_autovla().requires_grad_(False), []
    with torch.inference_mode():
        for seed in range(160):
            steer(target, seed)
            prompt = prompt_of(target, seed)
            text, lead = plain_greedy(target, prompt, seed)
            if lead > NEAR_TIE:
                found.append((seed, prompt, text))
    return target, found


def kinds(text):
    """Count what an answer shows."""
    acts = [token >= ACTION_START for token in text]
    return Counter(
        action_after_word=any(b and not a for a, b in zip(acts, acts[1:])),
        word_after_action=any(a and not b for a, b in zip(acts, acts[1:])),
        stopped=text[-1] in TOKENS.stop_ids, out_of_budget=len(text) == BUDGET)


def test_the_random_answers_show_what_they_must(cases):
    _, found = cases
    seen = sum((kinds(text) for _, _, text in found), Counter())
    assert len(found) > 100
    assert seen['action_after_word'] > 50 and seen['word_after_action'] > 50
    assert seen['stopped'] > 25 and seen['out_of_budget'] > 15


@torch.inference_mode()
def test_one_token_a_forward_equals_the_plain_loop(cases):
    target, found = cases
    for seed, prompt, text in found:
        steer(target, seed)
        assert spoken(target, prompt, seed)[0] == text, seed


@torch.inference_mode()
@pytest.mark.parametrize(('kind', 'rotary'), DRAFTS)
def test_every_draft_leaves_the_answer_as_it_is(cases, kind, rotary):
    target, found = cases
    matched = 0
    for seed, prompt, text in found[DRAFTS.index((kind, rotary))::3]:
        steer(target, seed)
        draft = small_draft(target, kind, rotary, seed, block=2 + seed % 7,
                            window=(0, 1, 6, 30)[seed % 4])
        said, stats = spoken(target, prompt, seed, draft)
        assert said == text, seed
        matched += sum(count - 1 for count in stats.committed)
    assert matched > 0  # even a random draft is right at times


@torch.inference_mode()
def test_a_draft_that_knows_the_answer_commits_blocks_up_to_every_stop(cases):
    target, found = cases
    ends = Counter()
    for seed, prompt, text in found[::2]:
        steer(target, seed)
        width, rng = 2 + seed % 7, random.Random(seed)
        speaker = Speaker(target, prompt_rows=ROWS, budget=BUDGET,
                          draft=small_draft(target, 'dflash', 'flat', block=width))
        wanted = [rng.randrange(width) for _ in text]
        left = iter(wanted)

        def propose(inputs, outputs, text=text, left=left, width=width, length=prompt.length):
            index, right = int(inputs['start']) - length, next(left)
            for row in range(width - 1):
                at = index + 1 + row
                truth = text[at] if at < len(text) else TOKENS.im_end
                outputs['proposals'][row] = truth if row < right else (truth + 1) % ACTION_START

        draft = speaker.draft
        speaker.draft = TorchExecutor(propose, draft.inputs, draft.outputs)
        speaker.see(random_frames(target.cfg, seed))
        speaker.read(prompt)
        said, stats = speaker.say()
        assert said == text, seed
        done, expected = 1, []
        while done < len(text):
            expected.append(min(wanted[len(expected)] + 1, len(text) - done))
            done += expected[-1]
        assert list(stats.committed) == expected, seed
        ends['stop inside a block'] += bool(expected) and text[-1] in TOKENS.stop_ids and (
            expected[-1] <= wanted[len(expected) - 1])
        ends['action inside a block'] += any(
            token >= ACTION_START for token in text[2:]) and max(expected, default=0) > 1
    assert min(ends.values()) > 10, ends


@torch.inference_mode()
def test_greedy_text_equals_transformers_generate(cases):
    target, found = cases
    for seed, prompt, text in found[::6]:
        steer(target, seed)
        patches = patchify_pairs(random_frames(target.cfg, seed))
        inputs = reference_inputs(target, prompt.token_ids.tolist(), patches)
        out = reference_model(target).generate(**inputs, do_sample=False, max_new_tokens=BUDGET)
        assert tuple(out[0, prompt.length:].tolist()) == text, seed


@torch.inference_mode()
@pytest.mark.parametrize('temperature', [0.2, 1.0])
def test_sampled_answers_do_not_depend_on_the_draft(cases, temperature):
    """The public code samples at 0.2; by the match rule a draft changes no token of a sample."""
    target, found = cases
    other = 0
    for seed, prompt, text in found[::5]:
        steer(target, seed)
        sampler, texts = Sampler(SamplingRule(temperature, 1.0), seed), []
        for draft in (None, small_draft(target, 'dflash', 'flat', seed),
                      small_draft(target, 'eagle3', 'mirror', seed)):
            speaker = Speaker(target, prompt_rows=ROWS, draft=draft, budget=BUDGET)
            speaker.see(random_frames(target.cfg, seed))
            speaker.read(prompt, sampler)
            texts.append(speaker.say(sampler)[0])
        assert texts[0] == texts[1] == texts[2], seed
        other += texts[0] != text
    assert other > 5  # it is not the greedy answer again


# ------------------------------------------------------------------------ rotary of the drafts

def test_a_mirror_draft_turns_as_its_target_does():
    target = small_autovla()
    mirror = dflash_config(target.cfg, rotary='mirror')
    flat = dflash_config(target.cfg)
    assert not mirror.mrope_interleaved and mirror.mrope_section == (1, 3, 4)
    prompt = prompt_of(target, 3)
    index, positions = torch.arange(prompt.length), torch.from_numpy(prompt.positions)
    want = reference_model(target).model.language_model.rotary_emb(torch.zeros(1),
                                                                   positions[:, None])
    for mine, theirs in zip(DraftRotary.tables(mirror, index, positions), want):
        torch.testing.assert_close(mine, theirs[0], rtol=0, atol=1e-6)
    got = DraftRotary.tables(flat, index, positions)
    for mine, theirs in zip(got, flat_cos_sin(index, 16, 5000.0)):
        assert torch.equal(mine, theirs)
    assert not torch.allclose(got[0], want[0][0])


def test_a_mirror_of_another_layout_is_refused():
    target = small_autovla()
    other = Dflash(dflash_config(target.cfg, rotary='mirror', mrope_interleaved=True))
    with pytest.raises(ConfigurationError, match='mrope_interleaved True, not False'):
        other.bind(target.text, TOKENS)
    flat = Dflash(dflash_config(target.cfg, mrope_interleaved=True))
    flat.bind(target.text, TOKENS)  # a flat draft does not read the layout


@torch.inference_mode()
@pytest.mark.parametrize('kind', ['dflash', 'eagle3'])
def test_rotary_decides_what_is_proposed(kind):
    """Same weights, taps and tokens: flat and mirror differ where videos bend the positions."""
    target = small_autovla()
    prompt = prompt_of(target, 1)
    capacity = prompt.length + 8
    tokens, generator = torch.zeros(capacity, dtype=torch.int64), torch.Generator().manual_seed(0)
    tokens[:prompt.length] = torch.from_numpy(prompt.token_ids)
    logits = []
    for rotary in ('flat', 'mirror'):
        draft = small_draft(target, kind, rotary, window=0)
        taps = TapBuffer(draft.cfg.taps, 1, capacity, 96)
        taps.rows.normal_(generator=generator.manual_seed(1))
        positions = torch.zeros((3, capacity), dtype=torch.int64)
        positions[:, :prompt.length] = torch.from_numpy(prompt.positions)
        executor = draft_executor(draft, target, tokens, taps, positions)
        for name, value in (('start', prompt.length - 1), ('length', prompt.length),
                            ('rope_delta', prompt.rope_delta)):
            executor.inputs[name].fill_(value)
        executor.enqueue()
        logits.append(executor.outputs['logits'].clone())
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3


def test_wrong_inputs_are_named():
    target = small_autovla().requires_grad_(False)
    speaker = Speaker(target, prompt_rows=ROWS)
    with pytest.raises(InputError, match='bring every camera to 140x84'):
        speaker.see(torch.zeros((4, 2, 84, 112, 3), dtype=torch.uint8))
    long = Prompt(np.zeros(200, dtype=np.int64), np.zeros((3, 200), dtype=np.int64), 0, 200)
    with pytest.raises(InputError, match='200 tokens, room for 96'):
        speaker.read(long)
