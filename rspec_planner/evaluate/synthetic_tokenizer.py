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
A tokenizer folder laid out like Qwen3-VL's, with the same ids and none of its text.

The model is byte-level BPE over 151,643 rows with Qwen's splitting rule; behind them come the 26
added tokens, so that the first free id is 151,669 as in the original. The merges are learnt
from a few words: `CORPUS` makes every word of the prompt one token, and '-thought' the two that
Alpamayo's prompt length of 3,006 tokens implies.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT_ROWS = 151_643
#: Qwen's own added tokens from 151,643 on; only the first are special
ADDED = (
    '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|object_ref_start|>', '<|object_ref_end|>',
    '<|box_start|>', '<|box_end|>', '<|quad_start|>', '<|quad_end|>', '<|vision_start|>',
    '<|vision_end|>', '<|vision_pad|>', '<|image_pad|>', '<|video_pad|>', '<tool_call>',
    '</tool_call>', '<|fim_prefix|>', '<|fim_middle|>', '<|fim_suffix|>', '<|fim_pad|>',
    '<|repo_name|>', '<|file_sep|>', '<tool_response>', '</tool_response>', '<think>',
    '</think>')
SPECIAL = 14
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r'|\s*[\r\n]+|\s+(?!\S)|\s+')
CORPUS = ('system user assistant You output Front Rear Turn Continue Keep frame chain -of -th '
          'ought left right camera telephoto are a driving assistant that generates safe and '
          'accurate actions the reasoning of process then future trajectory in onto straight '
          'because it is clear lane nudge brake').split()


def _backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior='isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    words = [w for word in CORPUS for w in (word, ' ' + word) if not word.startswith('-')]
    words += [word for word in CORPUS if word.startswith('-')]
    backend.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=2000, show_progress=False, min_frequency=1,
                                   initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return backend


def write_tokenizer_folder(folder: Path) -> Path:
    """Write the files that a tokenizer needs and return the folder."""
    content = json.loads(_backend().to_str())
    vocab = content['model']['vocab']
    for row in range(len(vocab), TEXT_ROWS):  # rows that no merge reaches
        vocab[f'filler{row}'] = row
    content['added_tokens'] = [
        {'id': TEXT_ROWS + k, 'content': token, 'single_word': False, 'lstrip': False,
         'rstrip': False, 'normalized': False, 'special': k < SPECIAL}
        for k, token in enumerate(ADDED)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'tokenizer.json').write_text(json.dumps(content), encoding='utf-8')
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'tokenizer_class': 'Qwen2Tokenizer', 'pad_token': ADDED[0], 'eos_token': ADDED[2],
        'model_max_length': 262_144, 'add_bos_token': False}), encoding='utf-8')
    return folder
