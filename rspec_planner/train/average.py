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
Mean of two targets' weights, where the second one went on from the first.

`python -m rspec_planner.train.average FIRST SECOND --share 0.35 --out FOLDER`.

Weights between those before and those after a training that specialised them often do as well on
what it trained and better on what nobody trained: Wortsman et al., Robust fine-tuning of zero-shot
models (arXiv 2109.01903).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any

from rspec_planner.errors import ConfigurationError, RspecError

_KEPT = ('kind', 'profile', 'revision', 'data_seed', 'parameters')  # of the second
_TOLD = ('revision', 'settings', 'steps', 'clips_seen', 'validation')  # of either, in the manifest


def average(first: str | Path, second: str | Path, share: float, out: str | Path
            ) -> dict[str, Any]:
    """
    Write the target (1 - share) * first + share * second; return its manifest.

    Config, tokenizer and the manifest's other entries are the second's, without its caution,
    which was chosen for other weights. ConfigurationError for a share outside [0, 1], EngineError
    for targets of different tensors and for a damaged folder.
    """
    import torch

    from rspec_planner.model.checkpoint import (
        check_tensors,
        CONFIG_NAME,
        read_files,
        read_manifest,
        read_weights,
        write_weights,
    )
    from rspec_planner.model.draft_checkpoint import target_digest
    if not 0.0 <= share <= 1.0:
        raise ConfigurationError(f'share {share:g}: choose 0 (the first target) to 1 (the second)')
    before, _ = read_weights(first, dtype=torch.float64)
    after, config = read_weights(second, dtype=torch.float64)
    check_tensors(before, after, first)
    mean = {name: (1.0 - share) * before[name] + share * tensor for name, tensor in after.items()}
    manifest, told = read_manifest(second), {}
    for name, folder in (('first', first), ('second', second)):
        found = read_manifest(folder)
        told[name] = {'target': target_digest(folder),
                      **{key: found[key] for key in _TOLD if key in found}}
    kept: dict[str, Any] = {key: manifest[key] for key in _KEPT if key in manifest}
    others = {name: data for name, data in read_files(second).items()
              if name != CONFIG_NAME and not name.endswith('.safetensors')}
    write_weights(mean, {**config, 'caution': None}, out,
                  {**kept, 'average': {'share': share, **told}}, extra_files=others)
    return read_manifest(out)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the last line of stdout is one JSON object."""
    parser = argparse.ArgumentParser(prog='average', description=(
        "Write the mean of two targets' weights as a checkpoint folder."))
    parser.add_argument('first', type=Path, help='checkpoint folder from which the second began')
    parser.add_argument('second', type=Path, help='checkpoint folder that went on from the first')
    parser.add_argument('--share', type=float, required=True, help='of the second, 0 to 1')
    parser.add_argument('--out', type=Path, required=True, help='checkpoint folder to write')
    options = parser.parse_args(arguments)
    try:
        average(options.first, options.second, options.share, options.out)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(json.dumps({'share': options.share, 'out': str(options.out)}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
