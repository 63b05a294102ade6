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
"""The policy of docs/security.md allows what the node does, and nothing else."""

from pathlib import Path
import re
import xml.etree.ElementTree as ElementTree

from node_rig import running
import pytest

from rspec_planner.transport import config_path

DOCS = Path(__file__).parent.parent / 'docs'
NAME, NAMESPACE = 'rspec_planner', '/planning'
#: there with Autoware's messages, under sim time, or where tf2_msgs is installed
SOMETIMES = {'/planning/rspec_planner/output/trajectories', '/clock', '/tf_static',
             '/planning/rspec_planner/output/trajectory/debug/published_time'}


def allowed(node, kind, rule):
    """Return the names that the policy allows a node."""
    tree = ElementTree.parse(config_path('rspec_planner.policy.xml'))
    return {item.text for profile in tree.iter('profile') if profile.get('node') == node
            for group in profile.iter(kind) if group.get(rule) == 'ALLOW' for item in group}


@pytest.mark.ros
def test_the_policy_is_what_the_node_does(ros):
    with running() as rig:
        node = rig.node
        for found, kind, rule in (
                (node.get_publisher_names_and_types_by_node, 'topics', 'publish'),
                (node.get_subscriber_names_and_types_by_node, 'topics', 'subscribe'),
                (node.get_service_names_and_types_by_node, 'services', 'reply')):
            names = {name for name, _ in found(NAME, NAMESPACE)}
            policy = allowed(NAME, kind, rule)
            assert names <= policy, names - policy
            assert policy - names <= SOMETIMES, policy - names


def test_only_the_supervisor_may_change_anything():
    calls = {node: allowed(node, 'services', 'request')
             for node in (NAME, 'rspec_supervisor', 'rspec_listener')}
    assert calls['rspec_supervisor'] == allowed(NAME, 'services', 'reply')
    assert calls[NAME] == calls['rspec_listener'] == set()
    for node in ('rspec_supervisor', 'rspec_listener'):
        assert not any('/output/' in name for name in allowed(node, 'topics', 'publish'))
        assert not any('/input/' in name for name in allowed(node, 'topics', 'publish'))


def test_what_the_document_names_exists():
    text = (DOCS / 'security.md').read_text(encoding='utf-8')
    root = DOCS.parent
    for name in re.findall(r'`((?:rspec_planner|test|config)/[\w./]+)`', text):
        assert (root / name).exists(), name
