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
from model_reference import small_target
import torch

from rspec_planner.model.flow import euler_sample
from rspec_planner.model.image import patchify
from rspec_planner.model.rope import mrope_cos_sin
from rspec_planner.model.target import Target
from rspec_planner.model.text import KVCache, place_visual
from rspec_planner.model.unicycle import UnicycleActionSpace


def drive(target: Target, images: torch.Tensor, steps: int = 10) -> tuple[list[int], torch.Tensor]:
    """Run one frame by hand: see, read, speak four words, act."""
    text, cfg = target.text, target.cfg
    features, deepstack = target.vision(patchify(images), cfg.patch_grid)
    count = features.shape[0] * features.shape[1]
    ids = torch.cat((torch.full((1, count), cfg.tokens.image_pad), torch.full((1, 5), 30)), 1)
    mask = ids == cfg.tokens.image_pad
    cache = KVCache(cfg.text, 1, count + 16)

    def tables(start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + rows).expand(3, -1)
        return mrope_cos_sin(positions, cfg.text.head_dim, cfg.text.rope_theta,
                             cfg.text.mrope_section)

    end = count + 5
    hidden = place_visual(text.embed(ids), mask, features)
    hidden = text(hidden, *tables(0, end), cache, 0, mask, deepstack, last_rows=1)
    said = []
    for _ in range(4):
        said.append(int(text.logits(hidden)[0, -1].argmax()))
        hidden = text(text.embed(torch.tensor([[said[-1]]])), *tables(end, 1), cache, end)
        end += 1
    context = target.expert.prepare(cache.keys[:, :, :, :end], cache.values[:, :, :, :end])
    cos, sin = tables(end, 64)
    noise = torch.randn(1, 64, 2, generator=torch.Generator().manual_seed(0))
    actions = euler_sample(lambda x, t: target.expert.velocity(x, t, context, cos, sin), noise,
                           steps)
    xy, _, _ = UnicycleActionSpace(cfg.action_space).integrate(actions, torch.tensor([8.0]))
    return said, xy


@torch.inference_mode()
def test_a_frame_runs_twice_to_the_same_bit_and_depends_on_the_images():
    target = small_target().pack()
    images = torch.randint(0, 256, (2, 64, 96, 3), dtype=torch.uint8)
    said, xy = drive(target, images)
    again, xy_again = drive(target, images)
    assert said == again and torch.equal(xy, xy_again)
    assert xy.shape == (1, 64, 2) and xy.isfinite().all()
    _, other = drive(target, 255 - images)
    assert float((xy - other).abs().max()) > 1e-3


@torch.inference_mode()
def test_packing_does_not_change_the_result():
    images = torch.randint(0, 256, (2, 64, 96, 3), dtype=torch.uint8)
    # one step: the random velocity field amplifies rounding a thousandfold per step
    said, xy = drive(small_target(), images, 1)
    packed_said, packed_xy = drive(small_target().pack(), images, 1)
    assert said == packed_said
    torch.testing.assert_close(xy, packed_xy, rtol=0, atol=1e-3)


def test_the_target_knows_where_and_what_it_is():
    target = small_target()
    assert target.device.type == 'cpu' and target.dtype == torch.float32
    assert target.to(torch.bfloat16).dtype == torch.bfloat16
    assert target.num_parameters() == sum(w.numel() for w in target.parameters())
