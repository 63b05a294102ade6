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
transformers' Qwen3-VL over the files of a released folder, loaded without our loader.

The backbone's keys are those of `Qwen3VLForConditionalGeneration` behind `vlm.`, the expert's
those of its text model behind `expert.`; both are loaded strictly, so that a key that only we
believe in cannot pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
import torch
from torch import nn, Tensor
from torch.nn import functional

from rspec_planner.engine.cuda_random import made_in
from rspec_planner.errors import EngineError
from rspec_planner.evaluate.bench_baseline import _transformers
from rspec_planner.model.action import ActionExpert
from rspec_planner.model.upstream_folder import INDEX_NAME


class ReferenceBackbone:
    """The backbone and the expert's layers as transformers builds them."""

    def __init__(self, folder: str | Path, device: torch.device, dtype: torch.dtype) -> None:
        """Read config, index and shards of a folder that carries its `vlm_config`."""
        self._folder = Path(folder)
        config = json.loads((self._folder / 'config.json').read_bytes())
        modules = _transformers().models.qwen3_vl.modeling_qwen3_vl
        whole, narrow = self._config(config), self._config(config)
        narrow.text_config.vocab_size = 8
        for name in ('hidden_size', 'intermediate_size', 'num_attention_heads', 'head_dim'):
            setattr(narrow.text_config, name, config['expert_cfg'][name])
        self.config, self.device, self.dtype = whole, device, dtype
        with made_in(dtype, device):
            self.vlm = modules.Qwen3VLForConditionalGeneration(whole).eval()
            self.expert = modules.Qwen3VLTextModel(narrow.text_config).eval()
        self._load(self.vlm, 'vlm.', frozenset())
        # the released class deletes the expert's table
        self._load(self.expert, 'expert.', frozenset({'embed_tokens.weight'}))

    @staticmethod
    def _config(config: dict[str, Any]) -> Any:
        """Return transformers' config, spelt for the version at hand."""
        library = _transformers()
        backbone = json.loads(json.dumps(config['vlm_config']))
        text = backbone['text_config']
        text['vocab_size'] = config['vocab_size']
        if int(library.__version__.split('.')[0]) >= 5:
            text['rope_parameters'] = {**text.pop('rope_scaling'),
                                       'rope_theta': text.pop('rope_theta')}
        made = library.Qwen3VLConfig(**backbone, tie_word_embeddings=False)
        for part in (made, made.text_config, made.vision_config):
            part._attn_implementation = 'sdpa'
        return made

    @torch.no_grad()
    def _load(self, module: nn.Module, prefix: str, absent: frozenset[str]) -> None:
        """Give a module exactly the tensors behind a prefix; EngineError for any other set."""
        index = json.loads((self._folder / INDEX_NAME).read_bytes())['weight_map']
        slots = module.state_dict()
        named = {key.removeprefix(prefix) for key in index if key.startswith(prefix)}
        if differing := named ^ (set(slots) - absent):
            raise EngineError(f'{self._folder}: transformers and the folder disagree about '
                              f'{len(differing)} tensors, {prefix}{sorted(differing)[0]} the '
                              'first: compare the versions')
        for name in sorted(set(index.values())):
            with safe_open(self._folder / name, framework='pt') as shard:
                for key in shard.keys():
                    if key.startswith(prefix):
                        slots[key.removeprefix(prefix)].copy_(shard.get_tensor(key))

    @torch.inference_mode()
    def see(self, patches: Tensor, grid: tuple[int, int], images: int
            ) -> tuple[Tensor, list[Tensor]]:
        """Return features (N * T, H) and DeepStack features of patch rows (N * P, values)."""
        out = self.vlm.model.visual(patches.to(self.dtype), grid_thw=self._grids(grid, images))
        if isinstance(out, tuple):  # transformers 4.57
            return out[0], list(out[1])
        return out.pooler_output, list(out.deepstack_features)

    def _grids(self, grid: tuple[int, int], images: int) -> Tensor:
        return torch.tensor([[1, *grid]] * images, device=self.device)

    @torch.inference_mode()
    def read(self, ids: Tensor, positions: Tensor, patches: Tensor, grid: tuple[int, int],
             images: int, keep: int) -> tuple[Tensor, Any]:
        """Return the logits (keep, V) of a prompt's last rows, and the cache."""
        cache = _transformers().DynamicCache()
        out = self.vlm(input_ids=ids[None], pixel_values=patches.to(self.dtype),
                       image_grid_thw=self._grids(grid, images),
                       position_ids=positions[:, None], past_key_values=cache, use_cache=True,
                       logits_to_keep=keep)
        return out.logits[0], cache

    @torch.inference_mode()
    def say(self, logits: Tensor, cache: Any, tokens: int, rope_delta: int,
            forbidden: tuple[int, int]) -> list[int]:
        """Return greedy tokens behind a cache, which grows by them."""
        said: list[int] = []
        row = logits.clone()
        for _ in range(tokens):
            row[forbidden[0]:forbidden[1]] = float('-inf')
            said.append(int(row.argmax()))
            position = torch.full((3, 1, 1), cache.get_seq_length() + rope_delta,
                                  device=self.device)
            out = self.vlm(input_ids=torch.tensor([[said[-1]]], device=self.device),
                           position_ids=position, past_key_values=cache, use_cache=True)
            row = out.logits[0, -1]
        return said

    @torch.inference_mode()
    def velocity(self, head: ActionExpert, noisy: Tensor, t: Tensor, cache: Any,
                 rope_delta: int) -> Tensor:
        """Return (1, W, 2) of the expert's layers between our projections; the cache stays."""
        rows, length = noisy.shape[1], cache.get_seq_length()
        mask = torch.zeros((1, 1, rows, length + rows), dtype=self.dtype, device=self.device)
        positions = (torch.arange(rows, device=self.device) + length + rope_delta).expand(
            3, 1, -1)
        out = self.expert(inputs_embeds=head.action_in_proj(noisy, t).to(self.dtype),
                          position_ids=positions, attention_mask=mask, past_key_values=cache,
                          use_cache=True)
        cache.crop(-rows)
        weight, bias = head.action_out_proj.weight, head.action_out_proj.bias
        return functional.linear(out.last_hidden_state, weight.to(self.dtype),
                                 bias.to(self.dtype)).float()

    def widen(self) -> None:
        """Compute in float32 from now on."""
        self.dtype = torch.float32
        self.vlm, self.expert = self.vlm.float(), self.expert.float()
