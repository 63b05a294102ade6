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
"""A node whose engine folder is broken stays unconfigured and says why."""

import contextlib
import json
from pathlib import Path

from node_rig import NodeRig, wait_until
import pytest
from tensorrt_rig import FakeLibrary, rtx_plan, write_engine, write_set
import torch

from rspec_planner.engine import tensorrt_library, tensorrt_runtime
from rspec_planner.engine.engine_manifest import SCHEMA
from rspec_planner.engine.stages import STAGE_NAMES
from rspec_planner.engine.tensorrt_library import FLAVOURS, host_name, Library
from rspec_planner.engine.tensorrt_runtime import Gpu
from rspec_planner.loading import load_planner
from rspec_planner.planner.staging import source_digests

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures('ros')]

GPU = Gpu(torch.device('cpu'), 'an RTX GPU', '86')
ENGINE, MANIFEST = 'verify.tensorrt_rtx.engine', 'verify.tensorrt_rtx.json'


class Folder:
    """An engine set of the embedded target, and ways to break it."""

    def __init__(self, path):
        self.path = path
        digests = source_digests('tiny')
        stages = write_set(path, names=STAGE_NAMES, checkpoints=digests)
        for stage in stages.stages:
            write_engine(path, stage.name, onnx_sha256=stage.sha256, host=host_name(),
                         checkpoints=digests)
        self.intact = {name.name: name.read_bytes() for name in path.iterdir() if name.is_file()}

    def repair(self):
        for name, data in self.intact.items():
            (self.path / name).write_bytes(data)

    def manifest(self, **changes):
        path = self.path / MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def swap(self):
        for one, other in ((ENGINE, ENGINE), (MANIFEST, MANIFEST)):
            (self.path / one).write_bytes(self.intact[other.replace('verify', 'prefill')])


#: what is broken -> (how, what the diagnostic says)
BROKEN = {
    'missing file': (lambda folder: (folder.path / ENGINE).unlink(), 'does not exist but its'),
    'wrong hash': (lambda folder: (folder.path / ENGINE).write_bytes(rtx_plan(fill=b'?')),
                   'has sha256'),
    'wrong sm': (lambda folder: folder.manifest(targets=['120']), 'this GPU has 86'),
    'wrong version': (lambda folder: folder.manifest(version='1.6.0'), 'installed is 1.7.1.116'),
    'wrong i/o': (lambda folder: folder.manifest(inputs=[]), 'lacks x float16'),
    'truncated': (lambda folder: (folder.path / ENGINE).write_bytes(rtx_plan()[:-9]),
                  '391 bytes, its manifest says 400'),
    'wrong precision': (lambda folder: folder.manifest(precision='bf16'), 'is bf16, fp16 is'),
    'swapped stages': (Folder.swap, 'describes stage prefill'),
    'stale checkpoint': (lambda folder: folder.manifest(checkpoints={'target': 'f' * 64}),
                         'belongs to target weights ffffffffffff'),
    'unreadable manifest': (lambda folder: (folder.path / MANIFEST).write_text('{'),
                            'is not valid JSON'),
    'newer schema': (lambda folder: folder.manifest(schema=SCHEMA + 1),
                     f'has schema {SCHEMA + 1}'),
    'no permission': (None, 'cannot be read (Permission denied)'),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(tensorrt_library, 'load_library',
                        lambda name: Library(FLAVOURS[name], fake))
    monkeypatch.setattr(tensorrt_runtime, 'find_gpu', lambda device: GPU)
    monkeypatch.setattr(torch.cuda, 'device', lambda device: contextlib.nullcontext())
    return Folder(tmp_path)


def test_each_broken_engine_folder_has_its_line_in_the_diagnostics(folder, monkeypatch):
    rig = NodeRig(['--ros-args', '-p', 'engine.backend:=tensorrt_rtx', '-p', 'model.device:=cuda',
                   '-p', f'engine.folder:={folder.path}'], load=load_planner)
    rig.listen()
    rig._thread.start()
    try:
        lines = set()
        for name, (damage, says) in BROKEN.items():
            folder.repair()
            with monkeypatch.context() as patch:
                if damage is None:
                    patch.setattr(Path, 'read_bytes', forbidding(folder.path / ENGINE))
                else:
                    damage(folder)
                assert not rig.node.start(), name
            assert rig.node._state_machine.current_state[1] == 'unconfigured', name
            status = rig.status('engine', lambda s, says=says: says in s.message, name)
            assert status.level == b'\x02'
            assert str(folder.path) in status.message
            assert '\n' not in status.message
            lines.add(status.message)
        assert len(lines) == len(BROKEN) == 12
        wait_until(lambda: rig.node._made is None, 'no planner')
    finally:
        rig.close()


def forbidding(forbidden, read=Path.read_bytes):
    """Return a reader that may not read one file; the tests may run as root, who may."""
    def reader(path):
        if path == forbidden:
            raise PermissionError(13, 'Permission denied', str(path))
        return read(path)
    return reader
