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
Record topics into a rosbag2 mcap bag, byte for byte, until a signal or a time limit.

Topics are found on the ROS graph by prefix and taken over with the QoS of their publishers, so
that a best-effort camera and a latched transform are both recorded. Log times are the recorder's
own clock at arrival. The bag appears under its name when recording ends.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
import json
import logging
from pathlib import Path
import shutil
import sys
import threading
import time
from typing import Any

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from rspec_planner.errors import InputError, RspecError
from rspec_planner.live.session import message_class, ros_node, stop_on_signals
from rspec_planner.world.bag import BagWriter

#: what the planner says, and what the world says of itself
OUTPUT_PREFIXES = ('/planning/', '/diagnostics', '/world/')
#: what the planner sees
INPUT_PREFIXES = ('/sensing/', '/localization/', '/tf', '/clock')
SCAN_S = 0.2
#: recording ends with a whole bag while there is still room for its index
MIN_FREE_BYTES = 64 * 2**20
LOGGER = logging.getLogger('rspec_planner.recorder')


class Recorder:
    """Subscriptions to every matching topic; each message goes to the bag as it arrives."""

    def __init__(self, node: Node, bag: BagWriter, prefixes: Sequence[str]) -> None:
        self._node, self._bag, self._prefixes = node, bag, tuple(prefixes)
        self.counts: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}
        self._topics: set[str] = set()

    def scan(self) -> None:
        """Subscribe to matching topics that have appeared since the last scan."""
        for topic, kinds in self._node.get_topic_names_and_types():
            if topic in self._topics or not topic.startswith(self._prefixes):
                continue
            if not self._node.count_publishers(topic):
                continue  # its QoS is known only when somebody publishes
            self._topics.add(topic)
            try:
                self._subscribe(topic, kinds[0])
            except (InputError, KeyError) as error:
                self.skipped[topic] = str(error)
                LOGGER.warning('%s is not recorded: %s', topic, error)

    def _subscribe(self, topic: str, kind: str) -> None:
        """Declare the topic in the bag and subscribe to its serialized messages."""
        message = message_class(kind)
        offers = [info.qos_profile for info in self._node.get_publishers_info_by_topic(topic)]
        latched = all(o.durability == DurabilityPolicy.TRANSIENT_LOCAL for o in offers)
        reliable = all(o.reliability == ReliabilityPolicy.RELIABLE for o in offers)
        package, _, name = kind.partition('/msg/')
        self._bag.add_topic(topic, f'{package}/{name}', latched=latched)

        def store(data: bytes) -> None:
            self._bag.write_serialized(topic, self._node.get_clock().now().nanoseconds, data)
            self.counts[topic] += 1

        self._node.create_subscription(message, topic, store, QoSProfile(
            depth=200,
            reliability=(ReliabilityPolicy.RELIABLE if reliable
                         else ReliabilityPolicy.BEST_EFFORT),
            durability=(DurabilityPolicy.TRANSIENT_LOCAL if latched
                        else DurabilityPolicy.VOLATILE)), raw=True)


def run_recorder(out: str | Path, *, inputs: bool = True, seconds: float = 0.0,
                 prefixes: Sequence[str] = (), ready_file: str = '',
                 stop: threading.Event | None = None) -> dict[str, Any]:
    """
    Record until a signal, `stop`, or `seconds` (0: no limit) and return what was recorded.

    `prefixes` replaces the built-in choice of topics. Returns bag, messages, seconds,
    topics {name: count}, skipped {name: reason} and, for a disk that is nearly full, `ok` False
    and `ended`. Raises InputError when the bag exists or there is no room to begin with.
    """
    full = _full_disk(Path(out))
    if full:
        raise InputError(f'bag {out} cannot be written: {full}')
    chosen = tuple(prefixes) or OUTPUT_PREFIXES + (INPUT_PREFIXES if inputs else ())
    began = time.monotonic()
    with (stop_on_signals() as stopped, ros_node('rspec_recorder') as (node, executor),
          BagWriter(Path(out), storage='mcap') as bag):
        recorder = Recorder(node, bag, chosen)
        recorder.scan()
        if ready_file:
            Path(ready_file).touch()
        scanned = began
        while not (stopped.is_set() or (stop is not None and stop.is_set())):
            now = time.monotonic()
            if seconds and now - began >= seconds:
                break
            if now - scanned >= SCAN_S:
                recorder.scan()
                scanned, full = now, _full_disk(Path(out))
                if full:
                    break
            executor.spin_once(timeout_sec=0.05)
    return {**({'ok': False, 'ended': full} if full else {}), 'bag': str(out),
            'messages': sum(recorder.counts.values()),
            'seconds': round(time.monotonic() - began, 3),
            'topics': dict(sorted(recorder.counts.items())), 'skipped': recorder.skipped}


def _full_disk(out: Path) -> str:
    """Return why there is no room for a bag, '' while there is."""
    folder = next((path for path in out.absolute().parents if path.is_dir()), Path('/'))
    free = shutil.disk_usage(folder).free
    return '' if free >= MIN_FREE_BYTES else \
        f'{free // 2**20} MiB are free in {folder}, {MIN_FREE_BYTES // 2**20} are kept; make room'


def main(argv: Sequence[str] | None = None) -> int:
    """Record as a process; print one JSON line at the end."""
    parser = argparse.ArgumentParser(prog='recorder', description='Record topics into a bag.')
    parser.add_argument('out', help='a name ending in .mcap, or a folder')
    parser.add_argument('--no-inputs', action='store_true', help='leave cameras and odometry out')
    parser.add_argument('--seconds', type=float, default=0.0, help='0 records until interrupted')
    parser.add_argument('--ready-file', default='', help='created when the recorder listens')
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format='%(levelname)s %(message)s')
    try:
        summary = run_recorder(options.out, inputs=not options.no_inputs,
                               seconds=options.seconds, ready_file=options.ready_file)
    except RspecError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(json.dumps(summary), flush=True)
    return 0 if summary.get('ok', True) else 1


if __name__ == '__main__':
    sys.exit(main())
