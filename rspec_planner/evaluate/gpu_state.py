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
Clocks, power and temperature of a GPU while something is measured on it.

A latency without them cannot be compared with another: a GPU that is hot or capped runs slower.
NVML answers through `pynvml` where it is installed, else `nvidia-smi` is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
import subprocess
from threading import Event, Thread
from typing import Any

import numpy as np
import torch

#: seconds between two samples; each costs the measured process some microseconds
INTERVAL_S = 0.5
#: name -> field of nvidia-smi
FIELDS = {'sm_mhz': 'clocks.sm', 'memory_mhz': 'clocks.mem', 'power_w': 'power.draw',
          'temperature_c': 'temperature.gpu', 'power_limit_w': 'power.limit'}
Sample = Mapping[str, float]


def _nvml(index: int) -> Callable[[], Sample]:
    """Return what asks NVML; ImportError without pynvml."""
    pynvml: Any = import_module('pynvml')
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    ask: dict[str, Callable[[], float]] = {
        'sm_mhz': lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        'memory_mhz': lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        'power_w': lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        'temperature_c': lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU),
        'power_limit_w': lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        'throttle_reasons': lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)}

    def sample() -> Sample:
        found = {}
        for name, function in ask.items():
            try:
                found[name] = float(function())
            except pynvml.NVMLError:
                continue  # what a driver does not tell is left out
        return found
    return sample


def _smi(index: int) -> Sample:
    """Return what nvidia-smi says; {} where it says nothing."""
    try:
        said = subprocess.run(
            ['nvidia-smi', f'--id={index}', f'--query-gpu={",".join(FIELDS.values())}',
             '--format=csv,noheader,nounits'], capture_output=True, text=True, timeout=5,
            check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for name, value in zip(FIELDS, said.strip().split(',')):
        try:
            found[name] = float(value)
        except ValueError:
            continue  # '[N/A]'
    return found


def sampler(index: int) -> Callable[[], Sample]:
    """Return what samples the GPU of an index."""
    try:
        return _nvml(index)
    except Exception:  # no module, or a driver that pynvml does not reach
        return lambda: _smi(index)


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Return lowest, median and highest value of each quantity."""
    names = sorted({name for sample in samples for name in sample})
    found: dict[str, Any] = {'samples': len(samples)}
    for name in names:
        values = [sample[name] for sample in samples if name in sample]
        if name == 'throttle_reasons':
            bits = int(np.bitwise_or.reduce([int(value) for value in values]))
            found[name] = f'0x{bits:x}'
        else:
            found[name] = {'min': min(values), 'p50': float(np.median(values)),
                           'max': max(values)}
    return found


@contextmanager
def watched(device: str) -> Iterator[dict[str, Any]]:
    """
    Sample in this block; the dict that is yielded is filled when it ends.

    Without a GPU it stays empty.
    """
    state = dict[str, Any]()
    place = torch.device(device)
    if place.type != 'cuda':
        yield state
        return
    ask = sampler(torch.cuda.current_device() if place.index is None else place.index)
    samples, done = [ask()], Event()

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            samples.append(ask())

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        done.set()
        thread.join()
        state.update(summary([sample for sample in samples if sample]))
