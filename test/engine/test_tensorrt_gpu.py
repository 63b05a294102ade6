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
What only a GPU that runs the engines can show; `rspec engine selftest` runs the same list.

Everything here is skipped where no installed flavour of TensorRT serves the GPU at hand.
"""

import pytest
import torch

from rspec_planner.engine.tensorrt_library import (
    check_targets,
    dotted,
    FLAVOURS,
    is_installed,
    load_library,
    present_sm,
)
from rspec_planner.errors import RspecError
from rspec_planner.evaluate.engine_selftest import CHECKS

REPLAYS = 1000


def serving():
    """Return the library that serves the GPU at hand, or why there is none."""
    if not torch.cuda.is_available():
        return None, 'no CUDA device: engines were never executed on this machine'
    sm, refusals = present_sm(), []
    for name in FLAVOURS:
        if not is_installed(name):
            refusals.append(f'{name} is not installed')
            continue
        try:
            library = load_library(name)
            check_targets(library.flavour, [sm], 'fp16', sm)
            return library, ''
        except RspecError as error:
            refusals.append(str(error))
    return None, f'no TensorRT runs on compute capability {dotted(sm)}: {"; ".join(refusals)}'


LIBRARY, REASON = serving()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=REASON)


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    from rspec_planner.engine.export import export_stages
    from rspec_planner.engine.tensorrt_runtime import find_gpu
    from rspec_planner.engine.tensorrt_set import build_set
    from rspec_planner.evaluate.engine_check import Amount
    from rspec_planner.evaluate.engine_selftest import cuda_device, moved, selftest
    from rspec_planner.planner.drafts import checkpoint_folder
    from rspec_planner.planner.staging import read_source
    folder = tmp_path_factory.mktemp('set')
    source = read_source('tiny', 'fp16', weights=True)
    export_stages(source.target, source.draft, source.shapes, 'fp16', source.checkpoints,
                  folder / 'onnx')
    build_set(LIBRARY, folder, [present_sm()])
    gpu = find_gpu('cuda')
    return selftest(LIBRARY, gpu, folder, moved(source, gpu), checkpoint_folder('tiny'),
                    Amount(clips=10), cuda_device(gpu), REPLAYS)


@pytest.mark.parametrize('name', CHECKS)
def test_on_the_gpu(report, name):
    assert report['checks'][name] is True, (CHECKS[name], report)
