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
"""The groups of the node's parameters; names, units and bounds are those of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rspec_planner.errors import ConfigurationError


def raise_problems(problems: Sequence[str]) -> None:
    """Raise ConfigurationError that lists all problems on one line; return when none."""
    if problems:
        raise ConfigurationError('; '.join(problems))


@dataclass(frozen=True)
class ModelParameters:
    """The target that reasons and plans."""

    checkpoint: str
    device: str
    precision: str  # 'auto', a dtype, or 'fp8'
    seed: int
    vision_cache: bool
    num_threads: int


@dataclass(frozen=True)
class EngineParameters:
    """What executes the networks."""

    backend: str  # 'torch', 'tensorrt' or 'tensorrt_rtx'
    folder: str
    loop: str  # 'auto', 'while', 'sync', 'pipelined', 'eager' or 'host', see planner.device_stages

    def __post_init__(self) -> None:
        if self.backend != 'torch' and self.loop not in ('auto', 'host'):
            raise ConfigurationError(f"'engine.loop' is {self.loop} and 'engine.backend' is "
                                     f"{self.backend}, whose engines the loop 'host' runs; set "
                                     "'engine.loop' to auto, or the backend to torch")
        if self.backend != 'torch' and not self.folder:
            raise ConfigurationError(f"'engine.folder' is empty and 'engine.backend' is "
                                     f"{self.backend}; give the folder that rspec engine build "
                                     'made')


@dataclass(frozen=True)
class CameraParameters:
    """Cameras in the order of ~/input/image0, image1, ..."""

    ids: tuple[int, ...]
    transport: tuple[str, ...]  # 'raw', 'compressed' or 'auto', one per id
    info_check: str  # 'ignore', 'warn' or 'refuse'
    fov_tolerance_deg: float
    content_check: str  # 'ignore' or 'refuse'

    def __post_init__(self) -> None:
        problems = []
        if list(self.ids) != sorted(self.ids):
            problems.append(f"'cameras.ids' {list(self.ids)} is not ascending; sort it")
        if len(self.transport) != len(self.ids):
            problems.append(f"'cameras.transport' has {len(self.transport)} entries for "
                            f"{len(self.ids)} 'cameras.ids'; give one per camera")
        raise_problems(problems)


@dataclass(frozen=True)
class SyncParameters:
    """How inputs are chosen by time around t0."""

    anchor_camera: int
    image_tolerance_ms: float
    image_wait_ms: float
    odometry_wait_ms: float
    odometry_max_gap_ms: float
    max_input_age_ms: float
    image_buffer_mib: float


@dataclass(frozen=True)
class PlanningParameters:
    """How often and how finely to plan."""

    rate_hz: float
    num_samples: int
    flow_steps: int  # 0: the checkpoint's own
    max_reasoning_tokens: int
    caution: bool  # slower while the target is unsure, where the checkpoint says what unsure is


@dataclass(frozen=True)
class SpeculationParameters:
    """How the reasoning is decoded; the text is the same in every case."""

    enabled: bool
    draft: str  # 'default', the name of an embedded draft, or a folder
    reuse: bool
    reuse_in: str  # 'verify' or 'prefill': where a reused text is verified
    min_accepted_length: float  # the speculation diagnostic warns below it
    check_every: int  # plans between two checks against the target alone, 0 for none


@dataclass(frozen=True)
class DeadlineParameters:
    """What happens when a plan comes late."""

    budget_ms: float
    max_pipeline_latency_ms: float
    on_miss: str  # 'skip' or 'last_valid'

    def __post_init__(self) -> None:
        if self.budget_ms > self.max_pipeline_latency_ms:
            raise ConfigurationError(
                f"'deadline.budget_ms' {self.budget_ms:g} exceeds "
                f"'deadline.max_pipeline_latency_ms' {self.max_pipeline_latency_ms:g}; lower it")


@dataclass(frozen=True)
class GuardParameters:
    """What a plan must keep before anyone may drive it, and what is published in its stead."""

    fallback: str  # 'none', 'last_valid' or 'stop'
    last_valid_max_age_ms: float
    stop_deceleration_mps2: float
    allow_reverse: bool
    max_start_error_m: float
    max_speed_error_mps: float
    max_step_m: float
    max_deceleration_mps2: float
    max_acceleration_mps2: float
    max_lateral_acceleration_mps2: float
    max_curvature_1pm: float

    def __post_init__(self) -> None:
        if self.stop_deceleration_mps2 > self.max_deceleration_mps2:
            raise ConfigurationError(
                f"'guard.stop_deceleration_mps2' {self.stop_deceleration_mps2:g} exceeds "
                f"'guard.max_deceleration_mps2' {self.max_deceleration_mps2:g}; lower it")


@dataclass(frozen=True)
class OutputParameters:
    """What is published."""

    message_set: str  # 'common' or 'autoware'
    frame: str  # 'odometry' or 'base_link'


@dataclass(frozen=True)
class VehicleParameters:
    """Footprint for the markers, from the rear-axle centre."""

    length_m: float
    width_m: float
    rear_overhang_m: float

    def __post_init__(self) -> None:
        if self.rear_overhang_m >= self.length_m:
            raise ConfigurationError(
                f"'vehicle.rear_overhang_m' {self.rear_overhang_m:g} is not below "
                f"'vehicle.length_m' {self.length_m:g}; measure from the rear axle")


@dataclass(frozen=True)
class DebugParameters:
    """Topics for people and tools."""

    marker: bool
    image_overlay: bool
    stage_times: bool
