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
"""Give every test process its ROS domain, one thread and a Triton, before anything is imported."""

import os

import pytest

#: two domains per worker would overlap between runs that happen to neighbour each other
_STRIDE = 7


def _domain():
    """Return a domain in 1..100 that differs between runs and between their workers."""
    run = os.environ.get('PYTEST_XDIST_TESTRUNUID', str(os.getpid()))
    worker = os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw')
    return 1 + (sum(run.encode()) * 13 + _STRIDE * int(worker)) % 100


os.environ['ROS_DOMAIN_ID'] = str(_domain())
os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
    os.environ.setdefault(name, '1')

import torch  # noqa: E402  with one thread

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, whichever test module does that
    os.environ['TRITON_INTERPRET'] = '1'


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, and say what is missing."""
    import importlib.util
    has_ros = importlib.util.find_spec('rclpy') is not None
    for item in items:
        if item.get_closest_marker('ros') and not has_ros:
            item.add_marker(pytest.mark.skip(reason='rclpy is not installed'))
        if item.get_closest_marker('gpu') and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason='no CUDA device'))


@pytest.fixture(autouse=True)
def freed_shared_memory(request):
    """Free what processes that a test killed leave in /dev/shm; twenty fill a small one."""
    yield
    if request.node.get_closest_marker('ros'):
        from rspec_planner.shared_memory import dead_segments, free_segments
        free_segments(dead_segments())


@pytest.fixture(scope='module')
def ros():
    """Run rclpy in a domain of this process alone."""
    from node_rig import private_domain
    import rclpy
    private_domain()
    rclpy.init()
    yield
    rclpy.shutdown()
