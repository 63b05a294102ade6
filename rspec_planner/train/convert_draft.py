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
`rspec train convert-draft`: a public draft as a checkpoint of ours, tied to a target.

Of the target only config.json and, for the mask of a DFlash draft, one row of its embedding are
read, so that a 22 GB checkpoint costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
import torch
from torch import Tensor

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.checkpoint import CONFIG_NAME, read_weights
from rspec_planner.model.config import ProfileConfig
from rspec_planner.model.draft_checkpoint import save_draft, target_digest
from rspec_planner.model.draft_layouts import draft_of, read_public_draft
from rspec_planner.model.upstream_config import read_upstream_config
from rspec_planner.model.upstream_folder import examine_folder, is_upstream
from rspec_planner.planner.drafts import checkpoint_folder

_EMBEDDING = 'text.embed_tokens.weight'


def convert_draft(source: str | Path, out: str | Path, *, target: str | Path, block: int = 0,
                  window: int = 0, revision: str = '') -> dict[str, Any]:
    """
    Write the draft in `source` to `out` and return what it is.

    source: a folder of a public layout, see `draft_layouts`. target: the checkpoint folder, or
    embedded name, that it was trained for; the result is refused by every other one. block,
    window: see `read_public_draft`.
    """
    if Path(out).resolve() == Path(source).resolve():
        raise ConfigurationError(f'--out {out} is the source; choose another folder')
    folder = checkpoint_folder(target)
    rows = _TargetRows(folder)
    public = read_public_draft(source, rows.profile, block=block, window=window)
    draft = draft_of(public, rows)
    digest = target_digest(folder)
    kind = draft.fc.weight.dtype
    save_draft(draft, out, {'kind': 'draft', 'target': digest, 'context': 'all',
                            'converted_from': {'folder': Path(source).name,
                                               'architecture': public.architecture},
                            'revision': revision}, kind)
    cfg = draft.cfg
    return {'name': cfg.name, 'kind': cfg.kind, 'label': cfg.label,
            'parameters': draft.num_parameters(), 'taps': list(cfg.taps), 'block': cfg.block,
            'head_rows': cfg.head_rows, 'own_head': cfg.own_head, 'qk_norm': cfg.qk_norm,
            'rope_theta': cfg.rope_theta, 'mask_id': public.mask_id,
            'dtype': str(kind).removeprefix('torch.'), 'checkpoint': str(out)}


class _TargetRows(Mapping[int, Tensor]):
    """The rows of a target's embedding, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Read the profile; EngineError when the folder is no checkpoint."""
        self._folder = folder
        self._table: Tensor | None = None
        if is_upstream(folder):
            self.profile = read_upstream_config(folder).profile
            return
        tensors, config = read_weights(folder)
        try:
            self.profile = ProfileConfig.from_dict(config)
        except (TypeError, KeyError, AttributeError) as error:
            raise EngineError(f'{folder / CONFIG_NAME} is not a profile ({error}): give the '
                              'folder of a target') from error
        self._table = tensors[_EMBEDDING]

    def __getitem__(self, index: int) -> Tensor:
        """Return row `index` (H,)."""
        if self._table is not None:
            return self._table[index]
        report = examine_folder(self._folder)
        theirs = next((name for name, (ours, _) in report.table.items() if ours == _EMBEDDING),
                      '')
        if theirs not in report.tensors:
            raise EngineError(f'{self._folder} lacks tensor {theirs or _EMBEDDING}: download the '
                              'folder again')
        with safe_open(self._folder / report.tensors[theirs].file, framework='pt') as shard:
            row: Tensor = shard.get_slice(theirs)[index:index + 1][0]
        return row.to(torch.float32)

    def __len__(self) -> int:
        return self.profile.text.vocab_size

    def __iter__(self) -> Any:
        return iter(range(len(self)))
