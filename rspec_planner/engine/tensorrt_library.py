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
The two TensorRT libraries behind one door: full TensorRT and TensorRT-RTX share one API.

Full TensorRT (module `tensorrt`) times kernels on the GPU that it builds for; TensorRT-RTX
(module `tensorrt_rtx`) builds ahead of time for a list of compute capabilities and compiles
its kernels when an engine is first used. What only one of them has is asked for by flavour,
never by trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import functools
import importlib
import importlib.util
import platform
from typing import Any

from rspec_planner.errors import ConfigurationError, EngineError

#: lowest compute capability whose tensor cores serve a precision (TensorRT-RTX 1.7 refuses
#: bf16 below 8.0 and FP8 below 8.9 when it builds; int8 weights are multiplied as bf16)
LOWEST_SM = {'fp16': 75, 'bf16': 80, 'fp8': 89, 'int8': 80}


@dataclass(frozen=True)
class Flavour:
    """
    One of the two libraries.

    name: also the Python module. ahead_of_time: compute capabilities that it builds for on a
    machine without them, as '86' for 8.6; empty: only for the GPU that is present.
    """

    name: str
    ahead_of_time: tuple[str, ...]
    install: str


FLAVOURS = {
    'tensorrt': Flavour(
        'tensorrt', (), 'it comes with JetPack and DRIVE OS; on a data-centre GPU install the '
        'libraries and the Python package of TensorRT 10.15 or newer from NVIDIA'),
    'tensorrt_rtx': Flavour(
        'tensorrt_rtx', ('75', '80', '86', '89', '120', '121'),
        'pip install -r requirements-engine.txt'),
}


class Library:
    """A loaded flavour; `module` is the Python module, `log` collects what it says."""

    def __init__(self, flavour: Flavour, module: Any) -> None:
        self.flavour = flavour
        self.module = module
        self.log = message_log(module)

    @property
    def version(self) -> str:
        """Return the version, for example '1.7.1.116'; an engine runs with no other."""
        return str(self.module.__version__)


def message_log(module: Any) -> Any:
    """
    Return a logger that keeps (severity, line) pairs in `messages` and prints nothing.

    severity is 'INTERNAL_ERROR', 'ERROR' or 'WARNING'; the rest is dropped. The library keeps
    the first logger of a process for good, so there is one, and users clear it.
    """
    class MessageLog(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages: list[tuple[str, str]] = []

        def log(self, severity: Any, text: str) -> None:
            if int(severity) <= int(module.ILogger.WARNING):
                self.messages.append((severity.name, ' '.join(text.split())))

        def errors(self) -> str:
            """Return the errors since the last clearing as one line."""
            lines = [text for severity, text in self.messages if severity != 'WARNING']
            return '; '.join(dict.fromkeys(lines)) or 'no reason given'

    return MessageLog()


def find_flavour(name: str) -> Flavour:
    """Return the flavour of that name; ConfigurationError when there is none."""
    if name not in FLAVOURS:
        raise ConfigurationError(f"flavour '{name}' is not known; use {' or '.join(FLAVOURS)}")
    return FLAVOURS[name]


def is_installed(name: str) -> bool:
    """Return whether the Python module of a flavour can be found; nothing is imported."""
    return importlib.util.find_spec(find_flavour(name).name) is not None


@functools.cache
def load_library(name: str) -> Library:
    """Return a flavour with its module; EngineError names the remedy when it is missing."""
    flavour = find_flavour(name)
    try:
        module = importlib.import_module(flavour.name)
    except ModuleNotFoundError as error:
        if error.name != flavour.name:
            raise
        raise EngineError(f"Python module '{flavour.name}' is missing: "
                          f'{flavour.install}') from error
    except (ImportError, OSError, RuntimeError) as error:  # a library that does not load
        raise EngineError(f"Python module '{flavour.name}' does not load "
                          f'({" ".join(str(error).split())}): {flavour.install}') from error
    return Library(flavour, module)


def host_name() -> str:
    """Return operating system and processor, for example 'linux-x86_64'; plans need both."""
    return f'{platform.system()}-{platform.machine()}'.lower()


def present_sm() -> str:
    """Return the compute capability of the current GPU as '86' for 8.6; '' without a GPU."""
    import torch
    if not torch.cuda.is_available():
        return ''
    major, minor = torch.cuda.get_device_capability()
    return f'{major}{minor}'


def check_targets(flavour: Flavour, sms: Sequence[str], precision: str,
                  present: str = '') -> tuple[str, ...]:
    """
    Return the compute capabilities to build for, sorted; '8.6' and '86' are the same.

    present: that of the GPU at hand, '' without one. Full TensorRT needs it and builds for
    nothing else; an empty `sms` then means that GPU.
    Raises ConfigurationError for an entry that the flavour or the precision does not serve.
    """
    if precision not in LOWEST_SM:
        raise ConfigurationError(f"precision '{precision}' is not known; use "
                                 f'{", ".join(LOWEST_SM)}')
    wanted = tuple(dict.fromkeys(sm.strip().replace('.', '') for sm in sms if sm.strip()))
    served = flavour.ahead_of_time or ((present,) if present else ())
    if not served:
        raise ConfigurationError(f'{flavour.name} builds on the GPU that it builds for and finds '
                                 'none: run this on that machine, or use --flavour tensorrt_rtx')
    if not wanted and flavour.ahead_of_time:
        raise ConfigurationError(f'{flavour.name} needs --sm: any of {",".join(served)}')
    for sm in wanted:
        if sm not in served:
            raise ConfigurationError(_refusal(flavour, sm, served))
        if int(sm) < LOWEST_SM[precision]:
            raise ConfigurationError(
                f'compute capability {dotted(sm)} has no {precision}, which needs '
                f'{dotted(str(LOWEST_SM[precision]))} or newer: leave --sm {sm} out or choose '
                '--precision fp16')
    return tuple(sorted(wanted or served, key=int))


def _refusal(flavour: Flavour, sm: str, served: Sequence[str]) -> str:
    if not sm.isdigit():
        return f"--sm '{sm}' is no compute capability; write for example --sm 86,89,120"
    if not flavour.ahead_of_time:
        return (f'{flavour.name} builds for the GPU at hand, compute capability '
                f'{dotted(served[0])}, not for {dotted(sm)}: leave --sm out, or build on a '
                f'machine with {dotted(sm)}')
    return (f'{flavour.name} does not serve compute capability {dotted(sm)}, only '
            f'{", ".join(map(dotted, served))}: use --flavour tensorrt on that machine, or '
            'engine.backend torch')


def dotted(sm: str) -> str:
    """Return '8.6' for '86'."""
    return f'{sm[:-1]}.{sm[-1]}'
