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
What the expert reads, against transformers stopped as the released models are.

Upstream stops one token after `<|traj_future_start|>`, because that token's keys and values are
written when the next one is computed. With L tokens of prompt and text, the surplus one
included, its cache holds L - 1 rows and ends with the anchor's. Here the anchor's row is written
without the surplus token; the rows must be the same.
"""

from dataclasses import replace

from model_reference import (
    mixed_prompt,
    reference_model,
    small_profile,
    small_target,
    three_axis_positions,
)
import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from rspec_planner.decode.reuse import place_guess
from rspec_planner.model.config import CameraConfig
from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import flat_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.planner.pipeline import torch_stages
from rspec_planner.planner.prompt import Prompt

CAMERAS = CameraConfig(names=('a', 'b', 'c'), ids=(0, 1, 2), frames=1, height=64, width=96)
BUDGET = 40


class OneMoreThan(StoppingCriteria):
    """Stops when the token before the last is the anchor."""

    def __init__(self, anchor, length):
        self.anchor, self.length = anchor, length

    def __call__(self, input_ids, scores, **kwargs):
        text = input_ids[0, self.length:].tolist()
        return torch.tensor([len(text) > 1 and text[-2] == self.anchor])


def ids_and_images():
    generator = torch.Generator().manual_seed(6)
    ids = mixed_prompt(generator)
    return ids, torch.randint(0, 256, (3, 64, 96, 3), generator=generator, dtype=torch.uint8)


def with_end(anchor):
    """Return the small target with three images whose reasoning ends with `anchor`."""
    weights = small_target()
    profile = small_profile()
    profile = replace(profile, cameras=CAMERAS,
                      tokens=replace(profile.tokens, traj_future_start=anchor))
    target = Target(profile).eval().requires_grad_(False)
    target.load_state_dict(weights.state_dict())
    return target


@torch.no_grad()
def generate(model, ids, images, **options):
    tokens = small_profile().tokens
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids),
        pixel_values=patchify(images).flatten(0, 1),
        image_grid_thw=torch.tensor([[1, 4, 6]] * 3), do_sample=False, use_cache=True,
        mm_token_type_ids=(ids == tokens.image_pad).long(), return_dict_in_generate=True,
        suppress_tokens=list(range(tokens.forbidden_start, tokens.forbidden_end)),
        pad_token_id=tokens.pad, **options)


def reasoned(target, ids, images, draft):
    """Return the stages after one frame, the generated ids and the expert's context length."""
    positions, delta = three_axis_positions(ids[0])
    prompt = Prompt(ids[0].numpy(), positions.numpy(), delta, ids.shape[1])
    stages = torch_stages(target, 256, 1, BUDGET, draft)
    stages.vision.inputs['images'].copy_(images)
    stages.vision.enqueue()
    inputs = stages.prefill.inputs
    inputs['features'].copy_(stages.vision.outputs['features'])
    inputs['deepstack'].copy_(stages.vision.outputs['deepstack'])
    inputs['ids'][:prompt.length] = ids[0]
    inputs['positions'][:, :prompt.length] = positions
    place_guess(stages.prefill, prompt.length, delta, ())
    stages.prefill.enqueue()
    generated, _, length = stages.reasoner.reason(prompt, stages.prefill)
    return stages, generated, length, delta


def random_draft(target):
    torch.manual_seed(1)
    draft = Dflash(dflash_config(target.cfg, block=4, window=4)).eval().requires_grad_(False)
    draft.initialise(target.text)
    return draft.bind(target.text, target.cfg.tokens)


@pytest.mark.parametrize('drafted', [False, True])
def test_the_expert_reads_what_upstream_caches(drafted):
    ids, images = ids_and_images()
    model = reference_model(small_target())
    free = generate(model, ids, images, max_new_tokens=16).sequences[0, ids.shape[1]:].tolist()
    anchor = next(t for k, t in enumerate(free) if k > 4 and t not in free[:k])
    out = generate(model, ids, images, max_new_tokens=BUDGET, stopping_criteria=(
        StoppingCriteriaList([OneMoreThan(anchor, ids.shape[1])])))
    whole = out.sequences[0].tolist()
    offset = ids.shape[1] + whole[ids.shape[1]:].index(anchor) + 1
    cache = out.past_key_values
    assert cache.get_seq_length() == len(whole) - 1 == offset

    target = with_end(anchor)
    stages, generated, length, delta = reasoned(
        target, ids, images, random_draft(target) if drafted else None)
    assert list(generated) == whole[ids.shape[1]:-1]
    assert length == offset
    assert delta == three_axis_positions(ids[0])[1] != 0

    text = target.cfg.text
    keys, values = (torch.stack([getattr(layer, name) for layer in cache.layers])
                    for name in ('keys', 'values'))
    noisy, t = torch.randn(1, 64, 2), torch.zeros(1)
    cos, sin = flat_cos_sin(offset + delta + torch.arange(64), text.head_dim, text.rope_theta)
    with torch.inference_mode():
        want = target.expert(noisy, t, keys, values, cos, sin)
        step = stages.flow_step
        for name, value in (('length', length), ('rope_delta', delta)):
            step.inputs[name].fill_(value)
        step.inputs['noisy'].copy_(noisy)
        step.inputs['t'].copy_(t)
        step.enqueue()
    torch.testing.assert_close(step.outputs['velocity'], want, rtol=0, atol=1e-4)
    # the row that is missing without the surplus forward matters
    with torch.inference_mode():
        short = target.expert(noisy, t, keys[:, :, :, :-1], values[:, :, :, :-1], cos, sin)
    assert float((short - want).abs().max()) > 1e-2


def test_rows_that_ended_earlier_hide_what_follows_their_anchor():
    """In a batch, offset < cache length for a row that ended early: [offset, length) is masked."""
    target, generator = small_target(), torch.Generator().manual_seed(2)
    text, length = target.cfg.text, 30
    shape = (text.num_layers, 2, text.num_kv_heads, length, text.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    offsets, delta = torch.tensor([21, length]), -7
    mask = torch.arange(length) < offsets[:, None]
    positions = offsets[:, None] + delta + torch.arange(64)
    cos, sin = flat_cos_sin(positions, text.head_dim, text.rope_theta)
    noisy, t = torch.randn(2, 64, 2, generator=generator), torch.tensor([0.3, 0.3])
    with torch.inference_mode():
        batch = target.expert(noisy, t, keys, values, cos, sin, mask)
        for row, offset in enumerate(offsets.tolist()):
            one = slice(row, row + 1)
            alone = target.expert(noisy[one], t[one], keys[:, one, :, :offset],
                                  values[:, one, :, :offset], cos[row], sin[row])
            torch.testing.assert_close(batch[one], alone, rtol=0, atol=1e-5)
        shifted = target.expert(noisy, t, keys, values, *flat_cos_sin(
            length + delta + torch.arange(64), text.head_dim, text.rope_theta), mask)
    assert float((shifted[0] - batch[0]).abs().max()) > 1e-4  # each row has its own positions
