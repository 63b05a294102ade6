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
What a navigation text may hold before a prompt is made of it.

It goes into the model's prompt, and anybody on the graph can publish it: no control characters,
no marks that could pass for the prompt's own (`<|...|>`, `<i3000>`), no length that costs time or
that the prompt has no room for. Judged once, when it comes: a text that only the prompt refused
would stop every plan until the next text.
"""

from __future__ import annotations

from rspec_planner.errors import InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.prompt import route_ids
from rspec_planner.planner.tokenizer import TextTokenizer

MAX_CHARACTERS = 500
REFUSED = 'navigation_text_refused'


def navigation_fault(text: str, profile: ProfileConfig, tokenizer: TextTokenizer | None) -> str:
    """
    Return why the target of `profile` cannot be given a text, one line, or ''.

    Without a tokenizer (a planner that has no prompt) its tokens are not counted.
    """
    if len(text) > MAX_CHARACTERS:
        return f'navigation text: {len(text)} characters, limit {MAX_CHARACTERS}; shorten it'
    if '<' in text or '>' in text:
        return "navigation text: '<' or '>' could pass for a token of the prompt; leave them out"
    if not text.replace('\n', ' ').isprintable():
        return 'navigation text: control characters; send plain text'
    if text.strip() and not profile.prompt.navigation:
        return (f'navigation text: {profile.name} was trained without any; send none, or load '
                'alpamayo-1.5')
    if tokenizer is not None:
        try:
            route_ids(profile, tokenizer, text)
        except InputError as error:
            return str(error)
    return ''
