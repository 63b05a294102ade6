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
Other nodes that would mix with this one: the same full name, or the same output topic.

ROS lets both happen without a word. Two nodes of one name share services and parameters, two
publishers of one output topic send plans that contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from rclpy.node import Node

#: what rmw says of a publisher whose node is not discovered yet, or has just gone
_UNKNOWN = '_NODE_NAME_UNKNOWN_'


def rivals(node: Node, outputs: Sequence[str]) -> list[str]:
    """Return one line for each conflict; `outputs` are full names of topics of this node."""
    own = node.get_fully_qualified_name()
    names = [f'{namespace.rstrip("/")}/{name}'
             for name, namespace in node.get_node_names_and_namespaces()]
    found = []
    if names.count(own) > 1:
        found.append(f'{names.count(own)} nodes are called {own}; end the others, or start this '
                     'one with -r __ns:=/other (one that died without a goodbye stays on the '
                     'graph for 20 s)')
    for topic in outputs:
        others = sorted({f'{info.node_namespace.rstrip("/")}/{info.node_name}'
                         for info in node.get_publishers_info_by_topic(topic)
                         if info.node_name != _UNKNOWN} - {own})
        if others:
            found.append(f'{", ".join(others)} also publishes {topic}, so two plans mix there; '
                         'end it or remap one of the two')
    return found
