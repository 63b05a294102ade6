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
Read files that describe something: small ones, whoever wrote them.

A file of a checkpoint, an engine or a user may be as long as its author liked, or be a link to a
device that never ends. What describes something is a few MB at most, the longest a tokenizer.
"""

from __future__ import annotations

import errno
from pathlib import Path

MAX_BYTES = 32 * 1024 * 1024


def read_bounded(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file; OSError also for one of more than `limit` bytes."""
    with Path(path).open('rb') as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f'more than {limit} bytes', str(path))
    return data
