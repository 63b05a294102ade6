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
Errors that a user can act on.

Each message is one line: the thing (file, topic, field), the value found, and the remedy.
The command line prints it and exits non-zero; the node turns it into a diagnostic.
"""


#: characters of a message; a sender may have put a megabyte into a field that it names
LONGEST = 500


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return a text that strangers had a hand in as one short line without control characters."""
    plain = ''.join(c if c.isprintable() else ' ' for c in text[:longest + 1])
    return plain if len(plain) <= longest else f'{plain[:longest - 3]}...'


class RspecError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(RspecError):
    """A parameter, profile or command-line value is missing, misspelt or out of range."""


class InputError(RspecError):
    """A bag, message or observation cannot be used; the message names it and the remedy."""


class EngineError(RspecError):
    """A weight file or engine is missing, damaged or does not fit its manifest."""
