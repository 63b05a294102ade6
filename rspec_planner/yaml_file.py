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
Read YAML that users and others wrote: bounded in length, without aliases, refused in one line.

ROS's own parser of parameter files knows no aliases either; nine lines of them unfold to a
thousand million values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rspec_planner.errors import ConfigurationError
from rspec_planner.model.bounded import read_bounded

#: of a parameter file or topic mapping; the shipped one has 5 kB
MAX_YAML_BYTES = 2**20


class _PlainLoader(yaml.SafeLoader):
    """Makes plain values; refuses aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f'alias *{event.anchor}: write the value out',
                                       problem_mark=event.start_mark)
        return super().compose_node(parent, index)  # type: ignore[no-untyped-call]


def read_yaml(path: str | Path, what: str) -> Any:
    """Return the content of a file; ConfigurationError starts with what it is and its path."""
    try:
        text = read_bounded(path, MAX_YAML_BYTES).decode()
        return _PlainLoader(text).get_single_data()  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigurationError(
            f'{what} {path} cannot be read ({error.strerror}); check the path') from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = ' '.join(str(error).split())
        raise ConfigurationError(f'{what} {path} is not YAML: {line}') from None
