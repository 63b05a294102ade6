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
"""The AutoVLA profiles by name, with what the tiny one needs to speak."""

from __future__ import annotations

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.autovla_config import autovla, autovla_tiny, AutoVlaConfig
from rspec_planner.model.codebook import ActionCodebook, arc_codebook
from rspec_planner.planner.action_tokenizer import ActionTokenizer, build_action_tokenizer
from rspec_planner.world.reasoning import vocabulary

AUTOVLA_PROFILES = ('autovla-tiny', 'autovla')
#: m/s and 1/m; with standstill 64 actions of half a second
TINY_SPEEDS = (1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 10.5, 12.5, 15.0)
TINY_CURVATURES = (-0.12, -0.04, -0.01, 0.0, 0.01, 0.04, 0.12)


def tiny_codebook() -> ActionCodebook:
    """Return the actions of the tiny profile: circular arcs."""
    return arc_codebook(TINY_SPEEDS, TINY_CURVATURES)


def tiny_tokenizer() -> ActionTokenizer:
    """Return the tokenizer of the tiny profile: the words of the embedded world."""
    return build_action_tokenizer(vocabulary(), tiny_codebook().size)


def autovla_profile(name: str) -> AutoVlaConfig:
    """Return the shapes of a profile; ConfigurationError for an unknown one."""
    if name == 'autovla':
        return autovla()
    if name == 'autovla-tiny':
        return autovla_tiny(tiny_tokenizer().tokens)
    raise ConfigurationError(f"profile '{name}': use one of {', '.join(AUTOVLA_PROFILES)}")
