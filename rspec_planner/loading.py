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
Load the planner that the parameters ask for, warm it up, and say what was loaded.

PyTorch is imported here, inside the functions, so that a node with a bad parameter file fails
before it spends seconds on imports.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import os
from pathlib import Path
import sys
import time
from typing import Any, TYPE_CHECKING

import numpy as np

from rspec_planner.errors import ConfigurationError
from rspec_planner.guard import guard_limits
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.history import history_stamps
from rspec_planner.planner.observation import Observation

if TYPE_CHECKING:
    from rspec_planner.parameters import NodeParameters  # needs jsonschema

_WARM_UP_T0_NS = 10_000_000_000
_WARM_UP_SPEED_MPS = 5.0


def processor_threads(wanted: int, processors: int) -> int:
    """
    Return how many threads a live planner computes with; 0 leaves one processor to the others.

    A thread that must share its processor holds up the others at every barrier: on two cores
    beside the world and a recorder, two threads gave 6 plans in 15 s and one thread 28.
    """
    return min(wanted, processors) if wanted else max(1, processors - 1)


def load_live_planner(parameters: NodeParameters) -> Any:
    """Return the Planner of a node, which shares the machine; see `processor_threads`."""
    import torch
    torch.set_num_threads(processor_threads(parameters.model.num_threads,
                                            len(os.sched_getaffinity(0))))
    return load_planner(parameters)


def load_planner(parameters: NodeParameters) -> Any:
    """Return the Planner of the checkpoint; raises EngineError with the remedy."""
    if parameters.engine.backend == 'torch':
        return _load(parameters)
    chosen_precision(parameters)
    import torch

    from rspec_planner.engine.stages import PRECISIONS
    from rspec_planner.planner.engine_stages import graph_stages
    engines = _load_engines(parameters)
    planner = _load(parameters, dtype=getattr(torch, PRECISIONS[engines.stages.precision]),
                    make_stages=graph_stages(engines.stages, engines.make))
    engines.prepare(torch.cuda.Stream(parameters.model.device))  # type: ignore[no-untyped-call]
    planner.executors = engines.describe()
    return planner


def _load(parameters: NodeParameters, **options: Any) -> Any:
    from rspec_planner.planner.pipeline import Planner
    speculation = parameters.speculation
    return Planner.load(
        parameters.model.checkpoint, device=parameters.model.device, seed=parameters.model.seed,
        num_samples=parameters.planning.num_samples,
        flow_steps=parameters.planning.flow_steps or None,
        max_reasoning_tokens=parameters.planning.max_reasoning_tokens,
        use_vision_cache=parameters.model.vision_cache, caution=parameters.planning.caution,
        draft=speculation.draft if speculation.enabled else None,
        reuse=speculation.enabled and speculation.reuse,
        limits=guard_limits(parameters.guard), loop=chosen_loop(parameters),
        guess_in=speculation.reuse_in, **{**chosen_precision(parameters), **options})


def chosen_precision(parameters: NodeParameters) -> dict[str, Any]:
    """Return what `model.precision` means to `Planner.load`; ConfigurationError with engines."""
    name = parameters.model.precision
    if name == 'auto':
        return {}
    if parameters.engine.backend != 'torch':
        raise ConfigurationError(f"model.precision '{name}': engines of "
                                 f"'{parameters.engine.backend}' have the precision that they "
                                 "were built for; leave it at 'auto'")
    import torch
    return {'fp8': True} if name == 'fp8' else {'dtype': getattr(torch, name)}


def chosen_loop(parameters: NodeParameters) -> str:
    """
    Return what 'auto' stands for in `engine.loop`, or what was chosen.

    A faster loop that leaves caution out must be asked for: `_knows_caution` comes before it.
    """
    if parameters.engine.loop != 'auto':
        return parameters.engine.loop
    resident = parameters.engine.backend == 'torch' and parameters.model.device != 'cpu'
    return 'while' if resident and not _knows_caution(parameters) else 'host'


def _knows_caution(parameters: NodeParameters) -> bool:
    """Return whether plans are to be slowed where the checkpoint's thresholds say so."""
    if not parameters.planning.caution:
        return False
    from rspec_planner.planner.checkpoints import folder_profile
    from rspec_planner.planner.drafts import checkpoint_folder
    return folder_profile(checkpoint_folder(parameters.model.checkpoint)).caution is not None


def _load_engines(parameters: NodeParameters) -> Any:
    """Return the engines of `engine.folder`, verified against the weights that will be bound."""
    from rspec_planner.engine.tensorrt_executor import load_set
    from rspec_planner.engine.tensorrt_library import load_library
    from rspec_planner.engine.tensorrt_runtime import find_gpu
    from rspec_planner.planner.staging import source_digests
    speculation = parameters.speculation
    library = load_library(parameters.engine.backend)
    digests = source_digests(parameters.model.checkpoint,
                             speculation.draft if speculation.enabled else 'none')
    return load_set(library, find_gpu(parameters.model.device), parameters.engine.folder, digests)


def warm_up_observation(profile: ProfileConfig) -> Observation:
    """Return grey images and a straight drive, of the shapes that real frames have."""
    cameras = profile.cameras
    stamps = history_stamps(_WARM_UP_T0_NS, cameras.frames)
    poses = np.tile(np.eye(4), (profile.history.num_poses, 1, 1))
    times_s = (history_stamps(0, profile.history.num_poses) / 1e9).astype(np.float64)
    poses[:, 0, 3] = _WARM_UP_SPEED_MPS * times_s
    return Observation(
        t0_ns=_WARM_UP_T0_NS, camera_names=cameras.names,
        images=np.full((len(cameras.names), cameras.frames, cameras.height, cameras.width, 3),
                       128, dtype=np.uint8),
        image_stamps_ns=np.tile(stamps, (len(cameras.names), 1)), ego_poses=poses,
        ego_pose_at_t0=np.eye(4), odometry_frame='map', speed_mps=_WARM_UP_SPEED_MPS)


def warm_up(planner: Any) -> float:
    """Plan twice on made-up input, each time without caches; return the second time in ms."""
    observation = warm_up_observation(planner.profile)
    planner.plan(observation)
    planner.reset()
    started = time.perf_counter()
    planner.plan(observation)
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    planner.reset()
    return elapsed_ms


def manifest_sha256(checkpoint: str) -> str:
    """
    Return the hash of a checkpoint's manifest, which holds those of its files; '' if none.

    A released folder has no manifest; its fingerprint stands in for it.
    """
    from rspec_planner.model.upstream_checkpoint import upstream_digest
    from rspec_planner.model.upstream_folder import is_upstream
    from rspec_planner.planner.drafts import EMBEDDED, EMBEDDED_NAMES
    folder = EMBEDDED / checkpoint if checkpoint in EMBEDDED_NAMES else Path(checkpoint)
    if is_upstream(folder):
        return upstream_digest(folder)
    manifest = folder / 'manifest.json'
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else ''


def engine_values(planner: Any, parameters: NodeParameters,
                  measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key values of the `engine` diagnostic."""
    values: dict[str, Any] = {'profile': planner.profile.name,
                              'checkpoint': parameters.model.checkpoint,
                              'device': parameters.model.device,
                              'precision': planner.precision, 'gpu': 'none',
                              'tensorrt_version': 'none', **planner.executors, **measured}
    values['manifest_sha256'] = manifest_sha256(parameters.model.checkpoint)
    torch = sys.modules.get('torch')
    if torch is not None and parameters.model.device.startswith('cuda'):
        values['gpu'] = torch.cuda.get_device_name(parameters.model.device)
    return values


def memory_values(device: str) -> dict[str, float]:
    """
    Return what the process holds now, MiB: resident memory, and GPU memory of PyTorch.

    Resident memory contains the pages of Fast DDS's shared segments that were used once, which
    grow up to their size; private memory does not.
    """
    resident, shared = (int(pages) * os.sysconf('SC_PAGE_SIZE') / 2**20 for pages in Path(
        '/proc/self/statm').read_text(encoding='ascii').split()[1:3])
    values = {'memory_mib': resident, 'memory_private_mib': resident - shared,
              'gpu_memory_mib': 0.0, 'peak_gpu_memory_mib': 0.0}
    torch = sys.modules.get('torch')
    if torch is not None and device.startswith('cuda'):
        values['gpu_memory_mib'] = torch.cuda.memory_allocated(device) / 2**20
        values['peak_gpu_memory_mib'] = torch.cuda.max_memory_allocated(device) / 2**20
    return values
