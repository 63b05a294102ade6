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
Examine the machine: what is installed, what is missing, what to do about it.

Every check stands alone and never stops the others. A GPU and TensorRT are told, not demanded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
import importlib
import os
from pathlib import Path
import shutil
import sys
from typing import Any
from xml.etree import ElementTree

from rspec_planner.errors import RspecError
from rspec_planner.shared_memory import dead_segments, SHARED_MEMORY

RESOURCE = Path(__file__).resolve().parent / 'resource' / 'tiny'
MESSAGE_PACKAGES = ('builtin_interfaces', 'diagnostic_msgs', 'geometry_msgs', 'lifecycle_msgs',
                    'nav_msgs', 'rosgraph_msgs', 'sensor_msgs', 'std_msgs', 'trajectory_msgs',
                    'visualization_msgs')
MIB = 1024 ** 2
#: four camera streams need this shared-memory segment in every process
SEGMENT_BYTES = 128 * MIB
NEEDED_MEMORY_BYTES = 2048 * MIB
NEEDED_CORES = 2

_INSTALL = 'make venv, or pip install -r requirements.txt'
_INSTALL_ROS = 'pip install -r requirements-ros.txt, or source a ROS 2 installation'


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty when there is nothing to do."""

    name: str
    ok: bool
    detail: str
    fix: str = ''


def _verdict(name: str, ok: bool, detail: str, fix: str) -> Check:
    """Return a finding that mentions its fix only when it is needed."""
    return Check(name, ok, detail, '' if ok else fix)


def _version(module: str, fix: str) -> Check:
    """Import a module and tell its version."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a broken shared library raises more than ImportError
        return Check(module, False, ' '.join(f'{type(error).__name__}: {error}'.split()), fix)
    return Check(module, True, str(getattr(found, '__version__', 'importable')))


def _python() -> Check:
    found = '.'.join(map(str, sys.version_info[:3]))
    return _verdict('python', (3, 11) <= sys.version_info[:2] <= (3, 13), found,
                    'use Python 3.11, 3.12 or 3.13: make PYTHON=python3.11 venv')


def _opencv() -> Check:
    import cv2
    import numpy as np
    done, data = cv2.imencode('.jpg', np.zeros((16, 16, 3), np.uint8))
    works = bool(done) and cv2.imdecode(data, cv2.IMREAD_COLOR) is not None
    return _verdict('opencv', works, f'{cv2.__version__}, JPEG {"works" if works else "fails"}',
                    'pip install opencv-python-headless==5.0.0.93')


def _messages() -> Check:
    missing = []
    for package in MESSAGE_PACKAGES:
        try:
            importlib.import_module(f'{package}.msg')
        except Exception:
            missing.append(package)
    return _verdict('ros_messages', not missing,
                    f'missing: {", ".join(missing)}' if missing else
                    f'{len(MESSAGE_PACKAGES)} packages', _INSTALL_ROS)


def _fastdds() -> Check:
    from rspec_planner.transport import fastdds_environment, PROFILE_VARIABLE
    path = Path(fastdds_environment()[PROFILE_VARIABLE])
    fix = f'unset {PROFILE_VARIABLE}, or point it to config/fastdds.xml'
    rmw = os.environ.get('RMW_IMPLEMENTATION', 'rmw_fastrtps_cpp')
    if rmw != 'rmw_fastrtps_cpp':
        return Check('fastdds_profile', True, f'not used: RMW_IMPLEMENTATION is {rmw}; raise '
                     'its own shared-memory limits for four camera streams')
    try:
        sizes = [int(node.text or 0) for node in ElementTree.parse(path).iter()
                 if node.tag.endswith('segment_size')]
    except (OSError, ElementTree.ParseError, ValueError) as error:
        return Check('fastdds_profile', False, f'{path}: {error}', fix)
    largest = max(sizes, default=0)
    if largest < SEGMENT_BYTES:
        return Check('fastdds_profile', False, f'{path}: shared-memory segment {largest // MIB} '
                     f'MiB; below {SEGMENT_BYTES // MIB} MiB the transport loses images of four '
                     'cameras, and their rates at the node are low', fix)
    shell = '' if PROFILE_VARIABLE in os.environ else (
        f'; this shell does not set {PROFILE_VARIABLE}: our programs do so themselves, set it '
        'for camera drivers too, the transport loses their images otherwise')
    return Check('fastdds_profile', True, f'{path}: shared-memory segment {largest // MIB} MiB'
                 + shell)


def _shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check('shared_memory', False, f'{SHARED_MEMORY} is missing',
                     'mount a tmpfs there; Fast DDS moves images through it')
    free, dead = shutil.disk_usage(SHARED_MEMORY).free, dead_segments(SHARED_MEMORY)
    detail = f'{free // MIB} MiB free in {SHARED_MEMORY}' + (
        f'; killed Fast DDS processes left {sum(segment.size for segment in dead) // MIB} MiB in '
        f'{len(dead)} segments, rspec doctor --free-shared-memory removes them' if dead else '')
    return _verdict('shared_memory', free >= 2 * SEGMENT_BYTES, detail,
                    'rspec doctor --free-shared-memory' if dead else
                    f'free {2 * SEGMENT_BYTES // MIB} MiB; in a container: --shm-size=1g')


def _weights() -> Check:
    from rspec_planner.model.checkpoint import read_files, read_manifest
    files = read_files(RESOURCE)
    size = sum(map(len, files.values()))
    made = read_manifest(RESOURCE).get('revision', '')
    return Check('weights', True, f'{len(files)} files, {size / 1e6:.1f} MB, all hashes match'
                 + (f', revision {str(made)[:12]}' if made else ''))


def _tokenizer() -> Check:
    from rspec_planner.planner.tokenizer import load_tokenizer
    return Check('tokenizer', True, f'{load_tokenizer(RESOURCE).vocab_size} rows')


def _parameters() -> Check:
    from rspec_planner.parameters import load_yaml_parameters, NodeParameters, PARAMETER_FILE
    from rspec_planner.transport import config_path
    path = config_path(PARAMETER_FILE)
    values = load_yaml_parameters(path)
    NodeParameters.from_values(values)
    return Check('parameters', True, f'{path}: {len(values)} values fit the schema')


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    return _verdict('cores', cores >= NEEDED_CORES, f'{cores} usable',
                    'give the process two cores; one cannot hold 10 Hz')


def _memory() -> Check:
    import psutil
    free = psutil.virtual_memory().available
    return _verdict('memory', free >= NEEDED_MEMORY_BYTES, f'{free // MIB} MiB available',
                    f'end other programs; the demo needs {NEEDED_MEMORY_BYTES // MIB} MiB')


def _gpu() -> Check:
    import torch
    if not torch.cuda.is_available():
        return Check('gpu', True, 'none (the tiny profile runs on the CPU)')
    return Check('gpu', True, f'{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}')


def _tensorrt() -> Check:
    """Tell each library, what it builds for, and whether it runs on the GPU at hand."""
    from rspec_planner.engine.tensorrt_library import (
        dotted,
        FLAVOURS,
        is_installed,
        load_library,
        present_sm,
    )
    names = [name for name in FLAVOURS if is_installed(name)]
    if not names:
        return Check('tensorrt', True, 'none (the tiny profile runs on PyTorch)')
    sm, told = present_sm(), []
    for name in names:
        library = load_library(name)
        served = library.flavour.ahead_of_time
        runs = not served or sm in served
        told.append(f'{name} {library.version}: ' + (
            'builds for ' + ', '.join(map(dotted, served)) if served else
            'builds for the GPU at hand') + (
            ', runs nowhere here (no GPU)' if not sm else
            f', {"runs" if runs else "does not run"} on this GPU ({dotted(sm)})'))
    return Check('tensorrt', True, '; '.join(told))


#: name -> (check, fix for a check that raises), in the order of the report
CHECKS: Mapping[str, tuple[Callable[[], Check], str]] = {
    'python': (_python, ''),
    'torch': (lambda: _version('torch', _INSTALL), _INSTALL),
    'opencv': (_opencv, _INSTALL),
    'rosbags': (lambda: _version('rosbags', _INSTALL), _INSTALL),
    'rclpy': (lambda: _version('rclpy', _INSTALL_ROS), _INSTALL_ROS),
    'ros_messages': (_messages, _INSTALL_ROS),
    'fastdds_profile': (_fastdds, 'reinstall the package'),
    'shared_memory': (_shared_memory, ''),
    'weights': (_weights, 'reinstall the package, or: git checkout rspec_planner/resource'),
    'tokenizer': (_tokenizer, 'reinstall the package, or: git checkout rspec_planner/resource'),
    'parameters': (_parameters, 'git checkout config, or correct the file'),
    'cores': (_cores, ''),
    'memory': (_memory, ''),
    'gpu': (_gpu, ''),
    'tensorrt': (_tensorrt, 'reinstall it, or uninstall it: pip uninstall tensorrt-rtx-cu13'),
}


def run_check(name: str) -> Check:
    """Run one check; whatever it raises becomes its finding."""
    check, fix = CHECKS[name]
    try:
        return check()
    except RspecError as error:
        return Check(name, False, str(error), fix)
    except Exception as error:
        return Check(name, False, ' '.join(f'{type(error).__name__}: {error}'.split()),
                     fix or 'report this')


def examine() -> dict[str, Any]:
    """Run all checks; return {'ok': bool, 'checks': [{name, ok, detail, fix}]}."""
    checks = [run_check(name) for name in CHECKS]
    return {'ok': all(check.ok for check in checks),
            'checks': [asdict(check) for check in checks]}
