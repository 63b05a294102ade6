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


class RspecError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(RspecError):
    """A parameter, profile or command-line value is missing, misspelt or out of range."""


class InputError(RspecError):
    """A bag, message or observation cannot be used; the message names it and the remedy."""


class EngineError(RspecError):
    """A weight file or engine is missing, damaged or does not fit its manifest."""
