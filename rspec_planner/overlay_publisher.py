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
Publish the plan drawn over the anchor camera's image, on a thread of its own.

Drawing takes tens of milliseconds, which the next plan must not wait for; a plan that comes
while the last picture is drawn replaces the one that waits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import CompressedImage

from rspec_planner.overlay import CameraView, draw_overlay
from rspec_planner.planner.plan import Plan
from rspec_planner.ros_conversions import compressed_image_message
from rspec_planner.worker import Worker

TOPIC = '~/debug/image_overlay/compressed'
_STOP_S = 2.0


class OverlayPublisher:
    """
    Draws only what somebody looks at.

    `image_at` returns the anchor's pixels (H, W, 3) RGB at a t0 or None when they are gone,
    `view` the camera's geometry at that size.
    """

    def __init__(self, node: LifecycleNode, image_at: Callable[[int], np.ndarray | None],
                 view: Callable[[], CameraView]) -> None:
        self._node = node
        self._image_at = image_at
        self._view = view
        self._worker: Worker[Plan] = Worker(self._draw, self._complain, 'overlay')
        self._publisher = node.create_lifecycle_publisher(
            CompressedImage, TOPIC,
            QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT,
                       durability=DurabilityPolicy.VOLATILE),
            qos_overriding_options=QoSOverridingOptions.with_default_policies())

    def offer(self, plan: Plan) -> None:
        """Draw a plan when somebody subscribes; returns at once."""
        if self._publisher.get_subscription_count() == 0:
            return
        if not self._worker.running:
            self._worker.start()
        self._worker.submit(plan)

    def destroy(self) -> None:
        """End the thread and take the topic off the graph, for cleanup."""
        self._worker.stop(_STOP_S)
        self._node.destroy_lifecycle_publisher(self._publisher)

    def _draw(self, plan: Plan) -> None:
        image = self._image_at(plan.t0_ns)
        if image is None:
            return  # the buffers were cleared since; the picture would be of another time
        view = self._view()
        picture = draw_overlay(image, plan, view)
        self._publisher.publish(compressed_image_message(picture, plan.t0_ns, view.name))

    def _complain(self, error: Exception) -> None:
        self._node.get_logger().error(f'the overlay cannot be drawn: {error}',
                                      throttle_duration_sec=5.0)
