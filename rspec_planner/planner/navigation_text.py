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
What a navigation text may hold before anything reads it.

It goes into the model's prompt, and anybody on the graph can publish it: no control characters,
no marks that could pass for the prompt's own (`<|...|>`, `<i3000>`), no length that costs time.
"""

from __future__ import annotations

MAX_CHARACTERS = 500
REFUSED = 'navigation_text_refused'


def navigation_fault(text: str) -> str:
    """Return why a text is refused, one line, or ''."""
    if len(text) > MAX_CHARACTERS:
        return f'navigation text: {len(text)} characters, limit {MAX_CHARACTERS}; shorten it'
    if '<' in text or '>' in text:
        return "navigation text: '<' or '>' could pass for a token of the prompt; leave them out"
    if not text.replace('\n', ' ').isprintable():
        return 'navigation text: control characters; send plain text'
    return ''
