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
Compare the files of a released folder with the sha256 sums that came with the download.

The folders have no manifest of their own, but whoever fetched them usually has the sums: the
hub's client writes one metadata file per download into `.cache/huggingface/download` (second
line: the etag, which for large files is the sha256) and names the blobs of its cache by it; or
`sha256sum` wrote SHA256SUMS. None of these is a signature: they find damage, not malice.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
import hashlib
from pathlib import Path
import re

from tqdm import tqdm

from rspec_planner.errors import EngineError

SUMS_NAME = 'SHA256SUMS'
HUB_METADATA = Path('.cache/huggingface/download')
_SUM = re.compile(r'[0-9a-f]{64}')
_LINE = re.compile(r'([0-9a-fA-F]{64})[ \t]+\*?(?:\./)?(\S+)')
_CHUNK = 1 << 24
#: files hashed at a time; hashing leaves the interpreter's lock
_THREADS = 4


def recorded_sums(folder: str | Path, names: Iterable[str]) -> dict[str, str]:
    """Return name -> sha256 in hex of those files for which one is recorded."""
    place = Path(folder)
    listed = _listed(place / SUMS_NAME)
    found = {}
    for name in names:
        recorded = listed.get(name) or _of_hub(place / HUB_METADATA / f'{name}.metadata') \
            or _of_blob(place / name)
        if recorded:
            found[name] = recorded
    return found


def _text(path: Path) -> str:
    """Return a small text file, '' where there is none."""
    try:
        return path.read_text(encoding='utf-8', errors='replace') if path.is_file() else ''
    except OSError:
        return ''


def _listed(path: Path) -> dict[str, str]:
    return {match[2]: match[1].lower() for match in _LINE.finditer(_text(path))}


def _of_hub(path: Path) -> str:
    lines = _text(path).splitlines()
    etag = lines[1].strip().strip('"') if len(lines) > 1 else ''
    return etag if _SUM.fullmatch(etag) else ''


def _of_blob(path: Path) -> str:
    """Return the sum in the name of the blob that a link of the hub's cache points to."""
    blob = path.resolve()
    return blob.name if path.is_symlink() and _SUM.fullmatch(blob.name) else ''


def differing(folder: str | Path, sums: dict[str, str]) -> list[str]:
    """Return one line for every file whose sha256 is not the recorded one."""
    place = Path(folder)
    total = sum((place / name).stat().st_size for name in sums)
    with tqdm(total=total, unit='B', unit_scale=True, disable=None, leave=False,
              desc='hashing') as bar, ThreadPoolExecutor(_THREADS) as pool:
        def compare(name: str) -> str:
            digest = hashlib.sha256()
            try:
                with (place / name).open('rb') as file:
                    while part := file.read(_CHUNK):
                        digest.update(part)
                        bar.update(len(part))
            except OSError as error:
                raise EngineError(f'{place / name} cannot be read ({error.strerror}): download '
                                  'it again') from None
            return digest.hexdigest()

        made = dict(zip(sums, pool.map(compare, sums)))
    return [f'{place / name} has sha256 {made[name][:12]}..., {wanted[:12]}... was recorded: '
            'download it again' for name, wanted in sums.items() if made[name] != wanted]
