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
"""The node of `rspec bench faults` with its guard taken out; the harness must notice."""

from rspec_planner import cycle
from rspec_planner.live.fault_node import load
from rspec_planner.node import RspecPlanner
from rspec_planner.planner.plan import Verdict
from rspec_planner.process import run_node
from rspec_planner.signals import leave

if __name__ == '__main__':
    cycle.check_plan = lambda plan, t0_ns, limits: Verdict(True)
    cycle.implausible = lambda observation, check_content: None
    leave(run_node(lambda full: RspecPlanner(load, arguments=full), None))
