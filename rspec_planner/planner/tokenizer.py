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
Word-level tokenizer of the embedded profile, with Alpamayo's special tokens by name.

Text is lower-cased and split at white space and punctuation; a hyphenated word stays whole.
Special tokens are reachable by name only: the string '<|im_end|>' inside a navigation text is
ordinary text (unknown words), so no input can close the prompt early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
import re
from typing import Protocol

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.config import HistoryConfig, TokenIds

TOKENIZER_FILE = 'tokenizer.json'
UNKNOWN = '<unk>'
#: rows of the embedding tables are padded to this multiple (tensor-core friendly)
ROW_MULTIPLE = 64

#: text of the prompt, piece by piece; a change here needs new weights
SYSTEM_TEXT = 'You are a driving assistant that generates safe and accurate actions.'
INSTRUCTION_TEXT = ('output the chain-of-thought reasoning of the driving process, '
                    'then output the future trajectory.')
ROLE_TEXTS = ('system\n', 'user\n', 'assistant\n')

#: names without the <|...|> frame, in id order; Alpamayo's names, so that prompts read alike
SPECIAL_NAMES = (
    'endoftext', 'im_start', 'im_end', 'vision_start', 'vision_end', 'image_pad', 'video_pad',
    'traj_history_start', 'traj_history', 'traj_history_end', 'cot_start', 'cot_end',
    'traj_future_start', 'traj_future', 'traj_future_end', 'route_start', 'route_pad',
    'route_end', 'question_start', 'question_end', 'answer_start', 'answer_end', 'mask',
)

_WORD = r"\w+(?:[-']\w+)*|[^\w\s]"
_NO_SPACE_BEFORE = re.compile(r' ([,.;:!?])')


def split_words(text: str) -> list[str]:
    """Return the lower-case words and punctuation marks that the tokenizer sees in `text`."""
    return re.findall(_WORD, text.lower())


class TextTokenizer(Protocol):
    """What a prompt and a planner need of a tokenizer, of whatever kind."""

    @property
    def vocab_size(self) -> int:
        """Return the number of rows."""

    @property
    def token_ids(self) -> TokenIds:
        """Return the ids that a profile needs by name."""

    def special(self, name: str) -> int:
        """Return the id of a special token by its bare name."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text, never of a special token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens."""

    def __hash__(self) -> int:
        """Prompts keep what depends on the tokenizer alone."""


class Tokenizer:
    """Ids of words and special tokens; immutable after construction."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self._words: dict[int, str] = {i: w for w, i in backend.get_vocab().items()}
        self._special_ids = {backend.token_to_id(f'<|{n}|>') for n in SPECIAL_NAMES}
        self._token_ids = _token_ids(self)

    @property
    def vocab_size(self) -> int:
        """Return the number of rows, padding rows included."""
        return int(self._backend.get_vocab_size())

    @property
    def token_ids(self) -> TokenIds:
        """Return the ids that a profile needs by name."""
        return self._token_ids

    @property
    def unknown_id(self) -> int:
        """Return the id that every word outside the vocabulary gets."""
        return self.id_of(UNKNOWN)

    def id_of(self, token: str) -> int:
        """Return the id of one token string; raises ConfigurationError when there is none."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise ConfigurationError(
                f'tokenizer: no token {token!r}; use a tokenizer built by build_tokenizer()')
        return int(found)

    def special(self, name: str) -> int:
        """Return the id of a special token by its bare name, for example 'cot_end'."""
        return self.id_of(f'<|{name}|>')

    def encode(self, text: str) -> list[int]:
        """Return one id per word or punctuation mark; unknown words become `unknown_id`."""
        return list(self._backend.encode(text).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens and with tight punctuation."""
        words = [self._words.get(int(i), UNKNOWN) for i in ids if i not in self._special_ids]
        return _NO_SPACE_BEFORE.sub(r'\1', ' '.join(words))

    def save(self, directory: str | Path) -> Path:
        """Write tokenizer.json into `directory` and return its path."""
        path = Path(directory) / TOKENIZER_FILE
        self._backend.save(str(path))
        return path


def build_tokenizer(words: Sequence[str]) -> Tokenizer:
    """
    Return the tokenizer of `words` plus the words of the prompt itself.

    Ids depend on the set of words only, not on their order: special tokens, <unk>, the sorted
    words, the 1,000 history bins, padding up to a multiple of 64 rows.
    """
    prompt = split_words(' '.join((SYSTEM_TEXT, INSTRUCTION_TEXT, *ROLE_TEXTS)))
    ordinary = sorted({w for text in words for w in split_words(text)} | set(prompt))
    rows = [f'<|{n}|>' for n in SPECIAL_NAMES] + [UNKNOWN] + ordinary + _history_bins()
    rows += [f'<|padding_{k}|>' for k in range(-len(rows) % ROW_MULTIPLE)]
    backend = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(rows)}, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Split(tokenizers.Regex(_WORD), behavior='isolated')])
    return Tokenizer(backend)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read tokenizer.json from `directory`; raises EngineError naming the file."""
    path = Path(directory) / TOKENIZER_FILE
    if not path.is_file():
        raise EngineError(f'{path}: file is missing; give a complete checkpoint folder')
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except ConfigurationError as error:
        raise EngineError(f'{path}: {error}') from error
    except Exception as error:  # the library raises a bare Exception for malformed files
        first_line = str(error).splitlines()[0]
        raise EngineError(f'{path}: not a tokenizer file ({first_line}); '
                          'restore it from the checkpoint') from error


def _history_bins() -> list[str]:
    """Return '<i3000>' ... '<i3999>', the names Alpamayo gives the history bins."""
    history = HistoryConfig()
    return [f'<i{history.first_bin_offset + k}>' for k in range(history.num_bins)]


def _token_ids(tokenizer: Tokenizer) -> TokenIds:
    """Return the ids by name; <i0> is virtual because this profile has only history bins."""
    first_bin = tokenizer.id_of(_history_bins()[0])
    named = {name: tokenizer.special(name) for name in (
        'image_pad', 'vision_start', 'vision_end', 'im_start', 'im_end', 'cot_start', 'cot_end',
        'traj_history_start', 'traj_history', 'traj_history_end', 'traj_future_start')}
    # the bins and the padding rows behind them: nothing there is a word
    return TokenIds(pad=tokenizer.special('endoftext'), **named,
                    traj_token_start=first_bin - HistoryConfig().first_bin_offset,
                    forbidden_start=first_bin, forbidden_end=tokenizer.vocab_size)
