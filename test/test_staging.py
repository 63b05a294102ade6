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
"""Which networks and sizes a name, a folder or a profile stands for before an export."""

from dataclasses import replace
import json

import pytest
from qwen_folder import write_tokenizer_folder
import torch
from upstream_rig import released_profile

from rspec_planner.engine.stage_narrow import is_narrow, rounded
from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.evaluate.synthetic_checkpoint import write_checkpoint
from rspec_planner.model.config import alpamayo_r1
from rspec_planner.planner import staging
from rspec_planner.planner.checkpoints import folder_profile, open_checkpoint
from rspec_planner.planner.drafts import checkpoint_folder, DEFAULT_DRAFT, EMBEDDED
from rspec_planner.planner.pipeline import Planner, torch_stages
from rspec_planner.planner.prompt import max_prompt_length
from rspec_planner.planner.staging import (
    check_drawable,
    known_profile,
    read_source,
    source_digests,
    stage_shapes,
)


def test_a_cache_holds_prompt_budget_block_and_actions():
    profile = replace(alpamayo_r1(), max_reasoning_tokens=256)
    plain = stage_shapes(profile, None, 3006, tail=1)
    assert plain.capacity == 3328  # 3006 + 256 + 1 + 64 = 3327, in buckets of 64
    assert (plain.block, plain.taps, plain.samples) == (1, (), 1)
    assert plain.prompt == 3006 + plain.guess
    assert plain.images == len(profile.cameras.names)
    six = stage_shapes(profile, None, 3006, tail=1, samples=6, budget=20)
    assert six.capacity == 3456  # 3006 + 20 + 1 + 384 = 3411
    assert six.guess == 20


def test_the_graphs_hold_what_the_planner_asks_for():
    source, asked = read_source('tiny', 'fp32'), []

    def make_stages(target, capacity, samples, budget, draft=None):
        asked.append((capacity, samples, draft.cfg))
        return torch_stages(target, capacity, samples, budget, draft)

    Planner.load('tiny', draft='default', make_stages=make_stages)
    ((capacity, samples, draft),) = asked
    assert capacity <= source.shapes.capacity < capacity + 2 * 64
    assert (samples, draft) == (source.shapes.samples, source.draft.cfg)
    assert (draft.block, draft.taps) == (source.shapes.block, source.shapes.taps)


def test_a_profile_without_weights_costs_no_memory():
    source = read_source('alpamayo-r1', 'bf16')
    assert source.target.device.type == 'meta'
    assert source.target.cfg.text.num_layers == 36
    assert source.target.text.lm_head.weight.dtype == torch.bfloat16
    assert source.checkpoints == {'target': '', 'draft': ''}
    assert source.shapes.block == source.draft.cfg.block > 1
    with pytest.raises(ConfigurationError, match='alpamayo-r1 has no weights here: give a check'):
        read_source('alpamayo-r1', 'bf16', weights=True)


def test_a_slice_is_the_profile_at_full_width_with_fewer_layers():
    whole, cut = known_profile('alpamayo-r1'), known_profile('alpamayo-r1-slice2')
    assert (cut.text.num_layers, cut.vision.depth) == (2, 2)
    assert cut.vision.deepstack_layers == (0, 1)
    assert replace(cut.text, num_layers=36) == whole.text
    assert cut.expert == whole.expert
    assert known_profile('alpamayo-1.5').name == 'alpamayo-1.5'
    assert check_drawable('tiny', 'fp16') is None
    for name in ('tiny', 'alpamayo-r1-slice0', 'alpamayo-r1-slice', 'other-slice2', '/a/folder'):
        assert known_profile(name) is None


def test_random_weights_that_do_not_fit_are_told_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(staging, 'available_bytes', lambda: 15 * 10**9)
    monkeypatch.setattr(torch.nn.Module, 'to_empty', lambda *a, **k: pytest.fail('allocated'))
    told = r'comparing alpamayo-r1-slice2 .* needs about 16.\d GB of memory and 15.0 GB are free'
    for refuse in (lambda: check_drawable('alpamayo-r1-slice2', 'fp32'),
                   lambda: read_source('alpamayo-r1-slice2', 'fp32', weights=True)):
        with pytest.raises(EngineError, match=told) as caught:
            refuse()
        assert '\n' not in str(caught.value)
    assert check_drawable('alpamayo-r1-slice2', 'bf16') is None  # half the bytes
    with pytest.raises(ConfigurationError, match='alpamayo-r1 has no weights here'):
        check_drawable('alpamayo-r1', 'bf16')


def test_digests_name_the_weights_without_reading_them(tmp_path):
    both = source_digests('tiny')
    assert set(both) == {'target', 'draft'}
    assert source_digests('tiny', 'none') == {'target': both['target']}
    assert source_digests('tiny', DEFAULT_DRAFT) == both
    assert source_digests('alpamayo-r1', 'none') == {'target': ''}
    assert checkpoint_folder('tiny') == EMBEDDED / 'tiny'
    assert checkpoint_folder(str(tmp_path)) == tmp_path
    with pytest.raises(EngineError, match='does not exist|cannot be read'):
        source_digests(str(tmp_path / 'nothing'))


def test_an_export_reads_no_weights_of_the_target(monkeypatch):
    loaded = read_source('tiny', 'fp16', weights=True)
    monkeypatch.setattr(staging, 'open_checkpoint', lambda *given: pytest.fail('read weights'))
    source = read_source('tiny', 'fp16')
    assert source.target.device.type == 'meta'
    assert (source.target.cfg, source.shapes, source.checkpoints) == (
        loaded.target.cfg, loaded.shapes, loaded.checkpoints)
    kinds = [{name: (weight.shape, weight.dtype) for name, weight in one.named_parameters()}
             for one in (source.target, loaded.target)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize('ours', [True, False])
@pytest.mark.parametrize('text', ['{', '{}', None])
def test_a_folder_without_a_profile_is_told(tmp_path, text, ours):
    if text is not None:
        (tmp_path / 'config.json').write_text(text)
    if ours:
        (tmp_path / 'manifest.json').write_text('{}')
    with pytest.raises(EngineError, match='config.json.*: .*') as caught:
        folder_profile(tmp_path)
    assert '\n' not in str(caught.value)


def test_a_precision_that_nobody_knows():
    with pytest.raises(ConfigurationError, match="precision 'fp4': use one of fp32, fp16, bf16"):
        read_source('tiny', 'fp4')


@pytest.mark.parametrize('precision', ['fp8', 'int8'])
def test_projections_are_rounded_where_the_precision_says_so(precision):
    wide, narrow = (read_source('tiny', kind, weights=True) for kind in ('bf16', precision))
    for one, other in ((wide.target, narrow.target), (wide.draft, narrow.draft)):
        kept = dict(other.named_parameters())
        for name, weight in one.named_parameters():
            wanted = rounded(weight, precision) if is_narrow(f'.{name}', precision) else weight
            assert torch.equal(kept[name], wanted), name
    # the joined weights of a packed layer are the same memory
    layer = narrow.target.text.layers[0]
    assert torch.equal(layer.packed.down.t(), layer.mlp.down_proj.weight)


def test_a_released_folder_is_staged_with_its_own_tokenizer(tmp_path):
    write_checkpoint(tmp_path, released_profile(), 'alpamayo_r1', shards=2)
    tokenizer = write_tokenizer_folder(tmp_path / 'qwen') / 'tokenizer.json'
    (tmp_path / 'tokenizer.json').write_bytes(tokenizer.read_bytes())
    source = read_source(str(tmp_path), 'bf16')
    assert source.draft is None  # a released folder comes without one
    assert set(source.checkpoints) == set(source_digests(str(tmp_path))) == {'target'}
    target, words = open_checkpoint(tmp_path, torch.device('cpu'), torch.bfloat16)
    assert source.shapes.prompt == max_prompt_length(target.cfg, words) + source.shapes.guess
    assert source.target.cfg == target.cfg
    index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
    assert len(set(index['weight_map'].values())) == 2
