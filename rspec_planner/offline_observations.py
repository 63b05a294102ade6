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
"""What a planner would see of a bag, without planning: the offline node with nobody behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rspec_planner.bag_topics import choose_topics, TopicNames
from rspec_planner.model.config import ProfileConfig
from rspec_planner.offline import BagPlanner, OfflineOptions, read_parameters
from rspec_planner.planner.buffers import Skip
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Verdict
from rspec_planner.planner.tokenizer import TextTokenizer
from rspec_planner.world.bag import BagReader


@dataclass(frozen=True)
class _Seen:
    """An observation in the place of its plan."""

    observation: Observation
    verdict: Verdict = Verdict(True)


@dataclass(frozen=True)
class _Observer:
    """Takes the place of a planner in the offline planning of a bag."""

    profile: ProfileConfig
    tokenizer: TextTokenizer | None

    def plan(self, observation: Observation) -> Any:
        """Return the observation itself."""
        return _Seen(observation)


def bag_observations(bag: Path, profile: ProfileConfig,
                     topics: Path | None = None, tokenizer: TextTokenizer | None = None
                     ) -> Iterator[Observation]:
    """
    Yield what a planner would see at each trigger of a bag, in its order.

    Triggers without all inputs are left out. topics: a file of topic names, see `rspec plan`.
    tokenizer: counts the tokens of navigation texts; those without room in a prompt are refused.
    """
    cameras = profile.cameras.names
    with BagReader(bag) as reader:
        chosen = choose_topics(bag, reader.topics, reader.counts,
                               TopicNames.read(topics, cameras), cameras)
        feeder = BagPlanner(_Observer(profile, tokenizer), chosen,
                            read_parameters(OfflineOptions()))
        for item in reader.read(chosen.all):
            for found in feeder.feed(item):
                if not isinstance(found, Skip):
                    yield cast('_Seen', found).observation
        for found in feeder.finish():
            if not isinstance(found, Skip):
                yield cast('_Seen', found).observation
