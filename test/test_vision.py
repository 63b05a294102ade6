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
from model_reference import reference_model, small_target
import torch
from torch.nn import functional

from rspec_planner.model.config import VisionConfig
from rspec_planner.model.image import patchify
from rspec_planner.model.vision import gelu_tanh, PatchMerger, VisionTower

GRID = (4, 6)
THW = [1, 4, 6]


def random_images(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 64, 96, 3), dtype=torch.uint8, generator=generator)


def test_features_and_deepstack_equal_the_reference_tower():
    target = small_target()
    model = reference_model(target)
    patches = patchify(random_images(3))
    with torch.no_grad():
        features, deepstack = target.vision(patches, GRID)
        want = model.model.visual(patches.flatten(0, 1), grid_thw=torch.tensor([THW] * 3))
    torch.testing.assert_close(features.flatten(0, 1), want.pooler_output, rtol=0, atol=1e-4)
    assert len(deepstack) == len(want.deepstack_features) == 3
    for mine, theirs in zip(deepstack, want.deepstack_features):
        torch.testing.assert_close(mine.flatten(0, 1), theirs, rtol=0, atol=1e-4)
    assert float(features.std()) > 0.05  # the comparison is about real signal


def test_images_do_not_see_each_other():
    vision = small_target().vision
    images = random_images(2)
    with torch.no_grad():
        both, _ = vision(patchify(images), GRID)
        alone, _ = vision(patchify(images[:1]), GRID)
    torch.testing.assert_close(both[:1], alone, rtol=0, atol=1e-5)


def test_a_patch_reaches_every_token_of_its_image():
    vision = small_target().vision
    images = random_images(1)
    changed = images.clone()
    changed[:, :16, :16] = 255 - changed[:, :16, :16]
    with torch.no_grad():
        before, after = (vision(patchify(x), GRID)[0] for x in (images, changed))
    assert ((before - after).abs().amax(-1) > 1e-4).all()


def test_patch_embedding_is_the_convolution_over_pixels():
    vision = small_target().vision
    images = random_images(1)
    volume = ((images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)[:, :, None].expand(
        -1, -1, 2, -1, -1)
    with torch.no_grad():
        got = vision.patch_embed(patchify(images))
        proj = vision.patch_embed.proj
        want = functional.conv3d(volume, proj.weight, proj.bias, stride=(2, 16, 16))[0, :, 0]
    merged = got.view(1, 2, 3, 2, 2, -1).permute(0, 5, 1, 3, 2, 4).reshape(-1, 4, 6)
    torch.testing.assert_close(merged, want, rtol=0, atol=1e-5)


def test_a_still_image_needs_one_time_slot():
    vision, images = small_target().vision, random_images(2)
    with torch.no_grad():
        both = vision.patch_embed(patchify(images))
        one = vision.patch_embed(patchify(images, temporal=1))
    torch.testing.assert_close(one, both, rtol=0, atol=1e-5)


def test_the_gelu_of_inference_is_that_of_training():
    x = torch.cat([torch.linspace(-60.0, 60.0, 4001), 30 * torch.randn(1000)])
    wanted = functional.gelu(x.double(), approximate='tanh')
    torch.testing.assert_close(gelu_tanh(x), functional.gelu(x, approximate='tanh'))
    with torch.no_grad():
        torch.testing.assert_close(gelu_tanh(x).double(), wanted, rtol=2e-6, atol=2e-6)


def test_positions_are_resampled_with_aligned_corners():
    vision = small_target().vision
    table = vision.pos_embed.weight.detach()
    want = functional.interpolate(table.T.view(1, -1, 7, 7), size=GRID, mode='bilinear',
                                  align_corners=True)[0]
    got = vision.positions(vision.grid_constants(GRID, table.device)).detach()
    ordered = got.view(2, 3, 2, 2, -1).permute(4, 0, 2, 1, 3).reshape(-1, 4, 6)
    torch.testing.assert_close(ordered, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(ordered[:, 0, 0], table[0])
    torch.testing.assert_close(ordered[:, 3, 5], table[48], rtol=0, atol=1e-6)


def test_mergers_normalise_before_and_after_the_regroup():
    cfg = VisionConfig(hidden_size=8, depth=1, num_heads=1, intermediate_size=8,
                       deepstack_layers=(0,), out_hidden_size=12)
    assert PatchMerger(cfg, after_regroup=False).norm.weight.shape == (8,)
    late = PatchMerger(cfg, after_regroup=True)
    assert late.norm.weight.shape == (32,)
    x = torch.randn(1, 4, 8)
    joined = functional.layer_norm(x.reshape(1, 1, 32), (32,), eps=1e-6)
    want = late.linear_fc2(functional.gelu(late.linear_fc1(joined)))
    torch.testing.assert_close(late(x), want)


def test_tables_made_for_inference_serve_training():
    tower = small_target().vision
    with torch.inference_mode():
        tower(patchify(random_images(1)), GRID)
    features, deepstack = tower(patchify(random_images(1)), GRID)
    (features.sum() + sum(d.sum() for d in deepstack)).backward()
    missing = [name for name, weight in tower.named_parameters() if weight.grad is None]
    assert not missing


def test_half_precision_weights_run():
    tower: VisionTower = small_target().vision.to(torch.bfloat16)
    with torch.no_grad():
        features, deepstack = tower(patchify(random_images(1)), GRID)
    assert features.dtype == deepstack[0].dtype == torch.bfloat16
    assert features.isfinite().all()
