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
"""Where embedded checkpoints and drafts lie, and which draft a name stands for."""

from __future__ import annotations

from pathlib import Path

from rspec_planner.errors import ConfigurationError

EMBEDDED = Path(__file__).parent.parent / 'resource'
EMBEDDED_NAMES = ('tiny',)
DRAFTS = 'drafts'  # beside the embedded checkpoints, and inside a checkpoint folder
#: the embedded draft that 'default' stands for; docs/results.md compares them
DEFAULT_DRAFT = 'dflash-l1-b24-w8-flat'


def checkpoint_folder(checkpoint: str | Path) -> Path:
    """Return the folder of a checkpoint that is given by name or path."""
    return EMBEDDED / checkpoint if checkpoint in EMBEDDED_NAMES else Path(checkpoint)


def embedded_drafts() -> tuple[str, ...]:
    """Return the names of the drafts that the package ships, the default first."""
    found = [path.parent.name for path in (EMBEDDED / DRAFTS).glob('*/config.json')]
    return tuple(sorted(found, key=lambda name: (name != DEFAULT_DRAFT, name)))


def draft_folder(draft: str, checkpoint: Path) -> Path:
    """
    Return the folder of a draft for a checkpoint folder.

    draft: 'default', the name of an embedded draft, or a folder. For a checkpoint of the user
    'default' is its own drafts/default. Raises ConfigurationError when there is none.
    """
    embedded = checkpoint.parent == EMBEDDED
    if draft == 'default':
        folder = EMBEDDED / DRAFTS / DEFAULT_DRAFT if embedded else checkpoint / DRAFTS / draft
    elif draft in embedded_drafts():
        folder = EMBEDDED / DRAFTS / draft
    else:
        folder = Path(draft)
    if not (folder / 'config.json').is_file():
        known = f' or an embedded name ({", ".join(embedded_drafts())})' if embedded else ''
        raise ConfigurationError(
            f"draft '{draft}' of {checkpoint} is not in {folder}; give a draft folder{known}, or "
            'switch speculation off (--draft none, speculation.enabled: false)')
    return folder
