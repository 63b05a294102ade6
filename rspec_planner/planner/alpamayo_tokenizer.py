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
The tokenizer of Alpamayo R1 and 1.5: Qwen3-VL's byte-level BPE plus 4,028 tokens by position.

The released checkpoints hold no tokenizer; the user gives the folder of one (the files of
Qwen/Qwen3-VL-8B-Instruct or of nvidia/Cosmos-Reason2-8B). Behind its ids come <i0> ... <i3999>
and then the named tokens below; their order decides the ids, so all of them are compared with
the ids of the checkpoint's config.json.

Text and special tokens never mix: text is encoded by the BPE alone, without any added token, so
the string '<|im_end|>' inside a navigation text stays text and can close no prompt. Between two
special tokens that is exactly what the whole tokenizer does with a text that names none.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
import json
from pathlib import Path
from typing import Any

import tokenizers

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.bounded import read_bounded
from rspec_planner.model.config import ProfileConfig, TokenIds
from rspec_planner.planner.tokenizer import TOKENIZER_FILE

#: ordinary tokens <i0> ... in front of the named ones: 3,000 future and 1,000 history bins
TRAJECTORY_TOKENS = 4000
#: names without the <|...|> frame, in id order
ADDED_NAMES = (
    'prompt_start', 'prompt_end', 'image_start', 'image_pre_tkn', 'image_end',
    'traj_history_start', 'traj_history_pre_tkn', 'traj_history_end', 'cot_start', 'cot_end',
    'meta_action_start', 'meta_action_end', 'traj_future_start', 'traj_future_pre_tkn',
    'traj_future_end', 'traj_history', 'traj_future', 'vectorized_wm', 'vectorized_wm_start',
    'vectorized_wm_end', 'vectorized_wm_pre_tkn', 'route_start', 'route_pad', 'route_end',
    'question_start', 'question_end', 'answer_start', 'answer_end',
)
#: fields of TokenIds and the names of their tokens, all of which a checkpoint must agree on
_NAMED = {
    'pad': 'endoftext', **{name: name for name in (
        'image_pad', 'vision_start', 'vision_end', 'im_start', 'im_end', 'cot_start', 'cot_end',
        'traj_history_start', 'traj_history', 'traj_history_end', 'traj_future_start')}}
REMEDY = ('give the tokenizer folder of Qwen/Qwen3-VL-8B-Instruct or nvidia/Cosmos-Reason2-8B')


class AlpamayoTokenizer:
    """Ids of text and special tokens; immutable after construction."""

    def __init__(self, text: tokenizers.Tokenizer, base: dict[str, int]) -> None:
        """
        Join the BPE of ordinary text and the added tokens of the base tokenizer.

        text: without added tokens. base: token string to id of Qwen's own special tokens.
        """
        self._text = text
        self._first_bin = max([text.get_vocab_size() - 1, *base.values()]) + 1
        named = {f'<|{name}|>': self._first_bin + TRAJECTORY_TOKENS + k
                 for k, name in enumerate(ADDED_NAMES)}
        self._ids = {**base, **named}
        self._ordinary = text.get_vocab_size()

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included."""
        return self._first_bin + TRAJECTORY_TOKENS + len(ADDED_NAMES)

    @property
    def token_ids(self) -> TokenIds:
        """Return the ids that a profile needs by name."""
        return TokenIds(**{field: self.special(name) for field, name in _NAMED.items()},
                        traj_token_start=self._first_bin, forbidden_start=self._first_bin,
                        forbidden_end=self._first_bin + TRAJECTORY_TOKENS)

    def special(self, name: str) -> int:
        """Return the id of a special token by its bare name, for example 'cot_end'."""
        found = self._ids.get(f'<|{name}|>')
        if found is None:
            raise ConfigurationError(f'tokenizer: no token <|{name}|>; {REMEDY}')
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text; names of special tokens in it are text too."""
        return list(self._text.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens and trajectory bins."""
        return str(self._text.decode([int(i) for i in ids if 0 <= int(i) < self._ordinary]))


def read_alpamayo_tokenizer(folder: str | Path) -> AlpamayoTokenizer:
    """
    Build the tokenizer from the `tokenizer.json` of a Qwen3-VL folder.

    A folder that already holds the Alpamayo tokens gives the same one. EngineError names the
    file and what is wrong with it; nothing in the folder is executed.
    """
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        raise EngineError(f'{path}: file is missing; {REMEDY}')
    try:
        content: dict[str, Any] = json.loads(read_bounded(path))
        added = {str(token['content']): int(token['id']) for token in content['added_tokens']}
        text = tokenizers.Tokenizer.from_str(
            json.dumps({**content, 'added_tokens': [], 'post_processor': None}))
        kind = content['model']['type']
    except Exception as error:  # the library raises a bare Exception for malformed files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EngineError(f'{path}: not a tokenizer file ({reason}); {REMEDY}') from error
    if kind != 'BPE':
        raise EngineError(f'{path}: model type {kind}, expected BPE; {REMEDY}')
    return AlpamayoTokenizer(text, _base_tokens(added))


@lru_cache(maxsize=4)
def load_alpamayo_tokenizer(folder: str | Path, profile: ProfileConfig) -> AlpamayoTokenizer:
    """
    Return the tokenizer of a folder, checked against the ids of the profile's config.json.

    EngineError names the first token whose id differs: a wrong id would still yield a prompt,
    and a plan, of a model that reads something else.
    """
    tokenizer = read_alpamayo_tokenizer(folder)
    path = Path(folder) / TOKENIZER_FILE
    try:
        found = tokenizer.token_ids
    except ConfigurationError as error:
        raise EngineError(f'{path}: {error}') from error
    for name in TokenIds.__dataclass_fields__:
        want, have = getattr(profile.tokens, name), getattr(found, name)
        if want != have:
            raise EngineError(f'{path}: {name} is {have}, config.json of the checkpoint says '
                              f'{want}; {REMEDY}')
    if tokenizer.vocab_size > profile.text.vocab_size:
        raise EngineError(f'{path}: {tokenizer.vocab_size} ids, the checkpoint has '
                          f'{profile.text.vocab_size} rows; {REMEDY}')
    return tokenizer


def _base_tokens(added: dict[str, int]) -> dict[str, int]:
    """Return the added tokens without those that this module adds."""
    own = {f'<|{name}|>' for name in ADDED_NAMES}
    own |= {f'<i{k}>' for k in range(TRAJECTORY_TOKENS)}
    return {token: number for token, number in added.items() if token not in own}
