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
Publish a bag on its own topics with `/clock`, in real time or at another rate.

The bytes go out as they were recorded, on their own topics or, with a mapping, on those of the
node. Message stamps are those of the recording, so a node that judges their age needs
`use_sim_time:=true`; /clock ticks at 100 Hz of bag time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import logging
from pathlib import Path
import sys
import threading
import time
from typing import Any

from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, QoSProfile
from rosgraph_msgs.msg import Clock
from tqdm import tqdm

from rspec_planner.bag_topics import (
    choose_topics,
    IMAGE_TYPES,
    ODOMETRY_TYPE,
    TopicNames,
)
from rspec_planner.command_line import camera_topic, NAVIGATION_TOPIC, ODOMETRY_TOPIC
from rspec_planner.errors import ConfigurationError, InputError, RspecError
from rspec_planner.live.session import message_class, ros_node, stop_on_signals
from rspec_planner.model.config import CameraConfig
from rspec_planner.ros_conversions import ns_to_stamp
from rspec_planner.world.bag import BagReader

CLOCK_STEP_NS = 10_000_000
DISCOVERY_S = 2.0  # how long the first message waits for somebody to listen
SETTLE_S = 0.3  # a reader may match up to this much later than its writer (60 ms measured)
RATES = (0.01, 100.0)
#: what a planner publishes itself; played beside a live one, two plans would mix
OUTPUTS = ('/planning/rspec_planner/output/', '/planning/rspec_planner/debug/', '/diagnostics')
LOGGER = logging.getLogger('rspec_planner.replay')


class Replayer:
    """Publishers for the topics of one bag and the clock that goes with them."""

    def __init__(self, node: Node, bag: BagReader, stopped: threading.Event,
                 names: Mapping[str, str]) -> None:
        """Publish each topic of the bag under its name in `names`; '' leaves it out."""
        self._bag, self._stopped = bag, stopped
        self.messages = 0
        self.skipped: dict[str, str] = {}
        self._clock = node.create_publisher(Clock, '/clock', 10)
        latched = bag.latched_topics()
        self._publishers: dict[str, Publisher[Any]] = {}
        self._inputs: list[Publisher[Any]] = []  # what a planner cannot do without
        for topic, kind in bag.topics.items():
            name = names.get(topic, topic)
            if name in ('', '/clock'):
                continue
            try:
                durability = (DurabilityPolicy.TRANSIENT_LOCAL if topic in latched
                              else DurabilityPolicy.VOLATILE)
                self._publishers[topic] = node.create_publisher(
                    message_class(kind), name, QoSProfile(depth=50, durability=durability))
                if kind in (*IMAGE_TYPES, ODOMETRY_TYPE):
                    self._inputs.append(self._publishers[topic])
            except InputError as error:
                self.skipped[topic] = str(error)
                LOGGER.warning('%s is not replayed: %s', topic, error)

    @property
    def topics(self) -> tuple[str, ...]:
        """Return the topics of the bag that are published."""
        return tuple(self._publishers)

    def wait_for_subscribers(self, timeout_s: float) -> None:
        """Wait until somebody listens and no more listeners appear, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        known, since = 0, time.monotonic()
        while time.monotonic() < deadline and not self._stopped.wait(0.02):
            count = sum(p.get_subscription_count() for p in self._publishers.values())
            if count != known:
                known, since = count, time.monotonic()
            if known and time.monotonic() - since > SETTLE_S:
                return

    def wait_for_planner(self, timeout_s: float) -> bool:
        """Wait until somebody listens to every camera and to the odometry; False: nobody did."""
        deadline = time.monotonic() + timeout_s
        while not all(p.get_subscription_count() for p in self._inputs):
            if time.monotonic() > deadline or self._stopped.wait(0.05):
                return False
        return not self._stopped.wait(SETTLE_S)

    def play(self, rate: float, advance: Callable[[int], Any]) -> None:
        """Publish the whole bag once; `advance(1)` is called for every message."""
        start = time.monotonic()
        first_ns = tick_ns = self._bag.start_ns
        for topic, log_ns, data in self._bag.read_serialized(self.topics):
            while tick_ns <= log_ns and self._wait(start + (tick_ns - first_ns) / 1e9 / rate):
                self._clock.publish(Clock(clock=ns_to_stamp(tick_ns)))
                tick_ns += CLOCK_STEP_NS
            if not self._wait(start + (log_ns - first_ns) / 1e9 / rate):
                return
            self._publishers[topic].publish(data)
            self.messages += 1
            advance(1)

    def _wait(self, due: float) -> bool:
        """Sleep until `due` on the monotonic clock; return False when asked to stop."""
        wait = due - time.monotonic()
        return not (self._stopped.wait(wait) if wait > 0 else self._stopped.is_set())


def new_names(bag: Path, reader: BagReader, topics: Path | None,
              inputs_only: bool) -> dict[str, str]:
    """
    Return topic of the bag -> topic to publish, as far as they differ; '' for none.

    `topics` maps what the bag holds to cameras and odometry, which go out under the names that
    the node listens to. Raises InputError that proposes a mapping when an input is missing.
    """
    names = {topic: '' for topic in reader.topics
             if inputs_only and topic.startswith(OUTPUTS)}
    if topics is None:
        return names
    cameras = CameraConfig().names
    chosen = choose_topics(bag, reader.topics, reader.counts, TopicNames.read(topics, cameras),
                           cameras)
    for topic, camera in chosen.cameras.items():
        compressed = reader.topics[topic].endswith('/CompressedImage')
        names[topic] = camera_topic(camera) + ('/compressed' if compressed else '')
    names[chosen.odometry] = ODOMETRY_TOPIC
    if chosen.navigation_text:
        names[chosen.navigation_text] = NAVIGATION_TOPIC
    return names


def run_replay(bag: str | Path, rate: float = 1.0, loop: bool = False, *,
               topics: Path | None = None, inputs_only: bool = False, wait_s: float = 0.0,
               progress: bool = True) -> dict[str, Any]:
    """
    Publish a bag until its end (with `loop`: until Ctrl-C).

    `topics` is a mapping file, see `new_names`; `inputs_only` leaves out what a planner published;
    `wait_s` is how long to wait for a planner that still loads its model.
    Returns messages, seconds, and skipped {topic: reason} for types that are not installed.
    Raises ConfigurationError for a rate out of range, InputError for a bag that cannot be read
    or that holds nothing to publish.
    """
    if not RATES[0] <= rate <= RATES[1]:
        raise ConfigurationError(f'rate {rate} is out of range; use {RATES[0]} to {RATES[1]}')
    began = time.monotonic()
    with (BagReader(Path(bag)) as reader, stop_on_signals() as stopped,
          ros_node('rspec_replay') as (node, _),
          tqdm(total=None if loop else reader.message_count, unit='msg',
               disable=None if progress else True,  # None: only on a terminal
               desc=f'replay {Path(bag).name}', file=sys.stderr) as bar):
        replayer = Replayer(node, reader, stopped,
                            new_names(Path(bag), reader, topics, inputs_only))
        if reader.message_count == 0 or not replayer.topics:
            raise InputError(f'bag {bag} holds no message that can be published here; '
                             'record one with: rspec record-world')
        if wait_s and not replayer.wait_for_planner(wait_s):
            LOGGER.warning('no planner listens to all inputs of %s after %.0f s; it is played '
                           'all the same', bag, wait_s)
        replayer.wait_for_subscribers(DISCOVERY_S)
        began = time.monotonic()
        replayer.play(rate, bar.update)
        while loop and not stopped.is_set():
            replayer.play(rate, bar.update)
        # the last reliable messages leave while the participant still lives
        stopped.wait(0.2)
    return {'messages': replayer.messages, 'seconds': round(time.monotonic() - began, 3),
            'skipped': replayer.skipped}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a replay as a process; print one JSON line at the end."""
    parser = argparse.ArgumentParser(prog='replay', description='Publish a bag with /clock.')
    parser.add_argument('bag')
    parser.add_argument('--rate', type=float, default=1.0)
    parser.add_argument('--loop', nargs='?', const='true', default='false',
                        choices=('true', 'false'), help='start again at the end')
    parser.add_argument('--topics', default='', help='YAML that maps topics of the bag')
    parser.add_argument('--inputs-only', action='store_true',
                        help='leave out what a planner published')
    parser.add_argument('--wait', type=float, default=0.0, metavar='SECONDS',
                        help='for a planner that listens to every input')
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format='%(levelname)s %(message)s')
    try:
        result = run_replay(options.bag, options.rate, options.loop == 'true',
                            topics=Path(options.topics) if options.topics else None,
                            inputs_only=options.inputs_only, wait_s=options.wait,
                            progress=False)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(json.dumps(result), flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
