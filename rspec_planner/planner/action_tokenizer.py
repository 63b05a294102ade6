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
Tokenizers with action tokens: that of an AutoVLA checkpoint, and a small one of words.

The actions are the last entries, <action_0> .. <action_{K-1}>. Special tokens are reachable by
name only; as text they are ordinary characters, so that no instruction can close a prompt early.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from rspec_planner.errors import ConfigurationError, EngineError
from rspec_planner.model.autovla_config import AutoVlaTokens
from rspec_planner.planner.autovla_prompt import DEFAULT_WORDING, Wording

TOKENIZER_FILE = 'tokenizer.json'
UNKNOWN = '<unk>'
#: by field of `AutoVlaTokens`
SPECIALS = {'pad': '<|endoftext|>', 'im_start': '<|im_start|>', 'im_end': '<|im_end|>',
            'vision_start': '<|vision_start|>', 'vision_end': '<|vision_end|>',
            'video_pad': '<|video_pad|>'}
#: a line end, a mark such as </think>, a digit, a word, any other character
_WORD = r"\n|</?[a-z]+>|\d|[A-Za-z]+(?:[-'][A-Za-z]+)*|[^\w\s]|\w"
#: how an answer is laid out (arXiv 2506.13757, appendix: prompts)
MARKS = ('<think>', '</think>', '<answer>', '</answer>', '\n')


def action_name(index: int) -> str:
    """Return the token of an entry of the codebook."""
    return f'<action_{index}>'


class ActionTokenizer:
    """Text to ids and back, see `autovla_prompt.Codec`."""

    def __init__(self, backend: tokenizers.Tokenizer, num_actions: int) -> None:
        """Append the actions where a backend lacks them; ConfigurationError if they misfit."""
        self._backend = backend
        backend.encode_special_tokens = True
        if backend.token_to_id(action_name(0)) is None:
            backend.add_tokens([tokenizers.AddedToken(action_name(index), normalized=False)
                                for index in range(num_actions)])
        self.tokens = AutoVlaTokens(**{field: self._id(name) for field, name in SPECIALS.items()},
                                    action_start=self._id(action_name(0)),
                                    num_actions=num_actions)
        last, size = self._id(action_name(num_actions - 1)), backend.get_vocab_size()
        if last != self.tokens.action_end - 1 or size != self.tokens.action_end:
            raise ConfigurationError(f'tokenizer: {size} entries, <action_0> is '
                                     f'{self.tokens.action_start} and '
                                     f'{action_name(num_actions - 1)} is {last}: the actions '
                                     'must be the last entries, in order')

    def _id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise ConfigurationError(f'tokenizer: no token {token!r}; use the tokenizer of a '
                                     'Qwen2.5-VL checkpoint')
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Return the ids of text, special tokens in it being ordinary characters."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; the prompt's special tokens have none."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def save(self, directory: str | Path) -> Path:
        """Write tokenizer.json into a folder and return its path."""
        path = Path(directory) / TOKENIZER_FILE
        self._backend.save(str(path))
        return path


def load_action_tokenizer(directory: str | Path, num_actions: int) -> ActionTokenizer:
    """Read tokenizer.json of a folder; EngineError names the file and the fault."""
    path = Path(directory) / TOKENIZER_FILE
    if not path.is_file():
        raise EngineError(f'{path}: file is missing; give a complete checkpoint folder')
    try:
        return ActionTokenizer(tokenizers.Tokenizer.from_file(str(path)), num_actions)
    except ConfigurationError as error:
        raise EngineError(f'{path}: {error}') from error
    except Exception as error:  # the library raises a bare Exception for malformed files
        raise EngineError(f'{path}: not a tokenizer file ({str(error).splitlines()[0]}); '
                          'restore it from the checkpoint') from error


def build_action_tokenizer(texts: Sequence[str], num_actions: int,
                           wording: Wording = DEFAULT_WORDING) -> ActionTokenizer:
    """Return the tokenizer of the words of texts and of a wording; ids depend on the set alone."""
    sentences = (wording.system, wording.introduction, *wording.videos, wording.state,
                 'system user assistant Video : . 0123456789 -')
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(r'[^\S\n]+'), behavior='removed'),
        pre_tokenizers.Split(tokenizers.Regex(_WORD), behavior='isolated')])
    words = {word for text in (*texts, *sentences)
             for word, _ in split.pre_tokenize_str(text)} | set(MARKS)
    rows = [*SPECIALS.values(), UNKNOWN, *sorted(words)]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(rows)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = split
    backend.add_special_tokens(list(SPECIALS.values()))
    return ActionTokenizer(backend, num_actions)
