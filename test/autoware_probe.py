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
"""Run the node with `output.message_set: autoware` and print what its topics carried as JSON."""

from __future__ import annotations

import json
import sys
import time

from autoware_internal_debug_msgs.msg import Float64Stamped, StringStamped
from autoware_internal_msgs.msg import PublishedTime
from autoware_internal_planning_msgs.msg import CandidateTrajectories
from autoware_planning_msgs.msg import Trajectory
from nav_msgs.msg import Path
from node_rig import NodeRig, private_domain, running, wait_until
import rclpy

from rspec_planner.ros_conversions import stamp_to_ns

ROOT = '/planning/rspec_planner'
TOPICS = {'output/trajectory': Trajectory, 'output/trajectories': CandidateTrajectories,
          'output/reasoning': StringStamped, 'debug/pipeline_latency_ms': Float64Stamped,
          'output/trajectory/debug/published_time': PublishedTime, 'output/path': Path}


def listen(rig: NodeRig) -> None:
    """Listen with Autoware's types: one process cannot have two types on a topic."""
    for name, kind in TOPICS.items():
        heard = rig.received.setdefault(name, [])
        rig.peer.create_subscription(kind, f'{ROOT}/{name}', heard.append, 10)


def main() -> int:
    private_domain()
    rclpy.init()
    NodeRig.listen = listen
    with running('output.message_set:=autoware') as rig:
        outputs = rig.node._made.outputs
        wait_until(lambda: all(publisher.get_subscription_count() for publisher in (
            outputs._trajectory, outputs._candidates, outputs._reasoning, outputs._published_time,
            outputs._numbers['pipeline_latency_ms'])), 'the match')
        t0 = rig.drive(time.time_ns())
        got = {name: wait_until(lambda name=name: rig.received[name], name)[0] for name in TOPICS}
    rclpy.shutdown()
    points = got['output/trajectory'].points
    candidates = got['output/trajectories']
    print(json.dumps({
        't0_ns': t0,
        'stamps': [stamp_to_ns(got[name].header.stamp) for name in (
            'output/trajectory', 'output/path', 'output/trajectory/debug/published_time')]
        + [stamp_to_ns(got['output/reasoning'].stamp)],
        'frame': got['output/trajectory'].header.frame_id,
        'times_ns': [stamp_to_ns(point.time_from_start) for point in points],
        'speeds': [point.longitudinal_velocity_mps for point in points],
        'heading_rates': [point.heading_rate_rps for point in points],
        'distance': points[64].pose.position.x - points[0].pose.position.x,
        'candidates': [len(item.points) for item in candidates.candidate_trajectories],
        'names': [item.generator_name.data for item in candidates.generator_info],
        'text': got['output/reasoning'].data,
        'latency_ms': got['debug/pipeline_latency_ms'].data,
        'number_age_ms': (stamp_to_ns(got['debug/pipeline_latency_ms'].stamp) - t0) / 1e6}))
    return 0


if __name__ == '__main__':
    sys.exit(main())
