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
The program `rspec_planner_node`; also `python -m rspec_planner`.

Imports take seconds, so signals are taken care of before them.
"""

from __future__ import annotations

from collections.abc import Sequence
import sys

from rspec_planner.signals import leave, leave_at_once


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the node until it is interrupted, and end the process with its exit code."""
    leave_at_once()
    from rspec_planner.node import main as run_planner
    leave(run_planner(arguments))


if __name__ == '__main__':
    main(sys.argv[1:])
