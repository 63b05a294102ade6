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
"""A planner without a model, for tests: one straight plan per front_wide frame."""

from __future__ import annotations

import json
import sys

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from nav_msgs.msg import Path
import numpy as np
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import Float64, String
from trajectory_msgs.msg import MultiDOFJointTrajectory
from visualization_msgs.msg import MarkerArray

from rspec_planner.decode.stats import DecodeStats
from rspec_planner.live.session import ros_node, stop_on_signals
from rspec_planner.markers import plan_markers
from rspec_planner.parameters import VehicleParameters
from rspec_planner.planner.plan import Plan, PLAN_POINTS, Reasoning, StageTimes, Verdict
from rspec_planner.ros_conversions import plan_path, plan_trajectory, stamp_to_ns

TEXT = 'cruising straight, keep speed because the road ahead is free.'
ROOT = '/planning/rspec_planner'
CAR = VehicleParameters(length_m=4.8, width_m=1.9, rear_overhang_m=1.0)


def straight_plan(t0_ns: int, speed: float = 8.0, text: str = TEXT,
                  pose: np.ndarray | None = None) -> Plan:
    """Return a plan that goes straight ahead at constant speed."""
    poses = np.zeros((PLAN_POINTS, 4))
    poses[:, 0] = np.arange(PLAN_POINTS) * 0.1 * speed
    speeds = np.full(PLAN_POINTS, speed)
    return Plan(t0_ns, poses, speeds, np.zeros(PLAN_POINTS), np.zeros(PLAN_POINTS), poses[None],
                speeds[None], np.eye(4) if pose is None else pose, 'map',
                Reasoning((1, 2, 3), text, True, DecodeStats(4, (5, 5, 5, 3))),
                StageTimes(2.0, 40.0, 30.0, 35.0, 20.0, 1.0), Verdict(True))


def diagnostics(published: int) -> DiagnosticArray:
    """Return what the monitor and the demo read of /diagnostics."""
    def status(task: str, **values: str) -> DiagnosticStatus:
        return DiagnosticStatus(name=f'rspec_planner: {task}', message='fine',
                                values=[KeyValue(key=k, value=v) for k, v in values.items()])
    stages = {'encode': 40.0, 'decode': 35.0}
    return DiagnosticArray(status=[
        status('inputs', skipped_total='2', skipped_history_short='2', skip_reason='',
               image0_rate_hz='10.000', image0_age_ms='41.000'),
        status('latency', processing_time_ms='128.000', p50_ms='120.000', p95_ms='130.000',
               p99_ms='131.000', pipeline_latency_p95_ms='160.000', budget_misses='0',
               **{f'{stage}_ms': f'{ms:.3f}' for stage, ms in stages.items()},
               **{f'{stage}_{key}_ms': f'{ms:.3f}' for stage, ms in stages.items()
                  for key in ('p50', 'p95', 'p99')}),
        status('speculation', window_accepted_length='4.500', iterations='4',
               reused_tokens='0', tokens_per_second='514.000'),
        status('inference_status', published_total=str(published), rejected_total='0')])


def main() -> int:
    """Plan until interrupted; '--die' fails after the first frame, '--silent' never plans."""
    with stop_on_signals() as stopped, ros_node('fake_planner') as (node, executor):
        outputs = {name: node.create_publisher(kind, f'{ROOT}/{name}', 10) for name, kind in (
            ('output/path', Path), ('output/trajectory', MultiDOFJointTrajectory),
            ('output/reasoning', String), ('output/reasoning_stamped', String))}
        marker = node.create_publisher(MarkerArray, f'{ROOT}/debug/marker', 10)
        numbers = {name: node.create_publisher(Float64, f'{ROOT}/debug/{name}', 10)
                   for name in ('processing_time_ms', 'pipeline_latency_ms',
                                'encode/processing_time_ms', 'decode/processing_time_ms',
                                'speculation/mean_accepted_length', 'speculation/iterations')}
        health = node.create_publisher(DiagnosticArray, '/diagnostics', 10)
        seen: list[int] = []

        def plan(message: CompressedImage) -> None:
            t0_ns = stamp_to_ns(message.header.stamp)
            made = straight_plan(t0_ns)
            seen.append(t0_ns)
            if '--silent' in sys.argv:
                return
            outputs['output/path'].publish(plan_path(made, 'odometry'))
            outputs['output/trajectory'].publish(plan_trajectory(made, 'odometry'))
            marker.publish(plan_markers(made, 'odometry', 0.1, CAR))
            outputs['output/reasoning'].publish(String(data=TEXT))
            outputs['output/reasoning_stamped'].publish(
                String(data=json.dumps({'t0_ns': t0_ns, 'text': TEXT})))
            for name, value in (('processing_time_ms', 128.0), ('pipeline_latency_ms', 130.0),
                                ('encode/processing_time_ms', 40.0),
                                ('decode/processing_time_ms', 35.0),
                                ('speculation/mean_accepted_length', 4.5),
                                ('speculation/iterations', 4.0)):
                numbers[name].publish(Float64(data=value))
            health.publish(diagnostics(len(seen)))

        for camera in ('cross_left', 'cross_right', 'front_tele', 'front_wide'):
            node.create_subscription(
                CompressedImage, f'/sensing/camera/{camera}/image_raw/compressed',
                plan if camera == 'front_wide' else lambda message: None,
                qos_profile_sensor_data)
        while not stopped.is_set():
            executor.spin_once(timeout_sec=0.05)
            if seen and '--die' in sys.argv:
                print('EngineError: weight file model.safetensors is missing; reinstall')
                return 3
    return 0


if __name__ == '__main__':
    sys.exit(main())
