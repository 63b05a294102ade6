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
"""The report of `rspec engine check`: what passes, what is found out, and where it is kept."""

from dataclasses import replace
import json
from types import SimpleNamespace

import numpy as np
import pytest

onnx = pytest.importorskip('onnx', reason='onnx is missing: requirements-engine.txt')
pytest.importorskip('onnxruntime', reason='onnxruntime is missing: requirements-engine.txt')

from export_rig import camera_target, exported, source_of  # noqa: E402
from tensorrt_rig import write_engine  # noqa: E402

from rspec_planner.engine.engine_manifest import read_manifest  # noqa: E402
from rspec_planner.engine.stages import file_sha256, read_stages, write_stages  # noqa: E402
from rspec_planner.errors import EngineError  # noqa: E402
from rspec_planner.evaluate import engine_check  # noqa: E402
from rspec_planner.evaluate.engine_check import Amount, check_folder, check_loop  # noqa: E402

RANDOM = Amount(random=2, frames=2, clips=50)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp('set') / 'onnx'
    source = source_of(camera_target(), 'dflash', block=4, window=2)
    exported(source, folder, names=('draft', 'verify', 'flow_step'))
    return source, folder


def test_without_a_tokenizer_random_frames_are_compared(small):
    source, folder = small
    shown = []
    found = check_folder(folder, source, None, RANDOM, lambda *part: shown.append(part))
    assert found['ok'] is True and found['loop'] is None
    assert (found['random_frames'], found['world_frames']) == (2, 0)
    assert shown == [('stages', 1, 2), ('stages', 2, 2)]
    stages = read_stages(folder)
    for row, stage in zip(found['engines'], stages.stages):
        assert (row['stage'], row['sha256'], row['checked']) == (stage.name, stage.sha256, True)
        assert 0.0 < row['error'] < 1e-5 < row['tolerance'] == 1e-4
    kept = json.loads((folder / 'checks.json').read_text())
    assert {**kept, 'manifests': []} == found


def test_the_result_goes_into_the_manifests_of_the_same_graphs(small):
    source, folder = small
    stages = read_stages(folder)
    write_engine(folder.parent, 'verify', onnx_sha256=stages.stage('verify').sha256)
    write_engine(folder.parent, 'draft', onnx_sha256='f' * 64)  # of an older export
    found = check_folder(folder, source, None, replace(RANDOM, random=1))
    assert found['manifests'] == ['draft', 'verify']
    numerics = read_manifest(folder.parent, 'verify', 'tensorrt_rtx').numerics
    row = {row['stage']: row for row in found['engines']}['verify']
    assert (numerics['checked'], numerics['error']) == (True, row['error'])
    assert (numerics['random_frames'], numerics['loop']) == (1, None)
    assert read_manifest(folder.parent, 'draft', 'tensorrt_rtx').numerics == {}


def test_a_manifest_that_is_not_readable_is_told_before_the_work(small, monkeypatch):
    source, folder = small
    broken = folder.parent / 'flow_step.tensorrt_rtx.json'
    broken.write_text('{')
    monkeypatch.setattr(engine_check, 'check_stages', lambda *given: pytest.fail('compared'))
    try:
        with pytest.raises(EngineError, match='flow_step.tensorrt_rtx.json is not valid JSON'):
            check_folder(folder, source, None, RANDOM)
    finally:
        broken.unlink()


def test_a_graph_that_computes_something_else_fails_alone(small, tmp_path):
    source, folder = small
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = onnx.load(tmp_path / 'flow_step.onnx')
    (first, *_) = (node for node in model.graph.node if node.op_type == 'RMSNormalization')
    next(entry for entry in first.attribute if entry.name == 'epsilon').f = 0.5
    onnx.save(model, tmp_path / 'flow_step.onnx')
    stages = read_stages(tmp_path, verify=False)
    write_stages(replace(stages, stages=tuple(
        replace(stage, sha256=file_sha256(tmp_path / stage.file)) for stage in stages.stages)),
        tmp_path)
    found = check_folder(tmp_path, source, None, replace(RANDOM, random=1))
    assert found['ok'] is False and found['manifests'] == []
    assert {row['stage'] for row in found['engines'] if not row['checked']} == {'flow_step'}


def test_a_folder_of_other_weights_is_refused(small):
    source, folder = small
    other = replace(source, checkpoints={**source.checkpoints, 'target': 'three'})
    with pytest.raises(EngineError, match='for weights target one, draft two, given are target '
                                          'three, draft two: export it again'):
        check_folder(folder, other, None, RANDOM)


class FakePlanner:
    """Plans what it is told to, one entry of (words, committed, shift in metres) per clip."""

    def __init__(self, script):
        self.script = iter(script)

    def plan(self, observation):
        words, committed, shift = next(self.script)
        poses = np.zeros((65, 4))
        poses[:, 1] = shift
        return SimpleNamespace(poses=poses, reasoning=SimpleNamespace(
            token_ids=words, stats=SimpleNamespace(committed=committed)))


def test_a_loop_counts_texts_iterations_and_paths(small, monkeypatch):
    source, folder = small
    plain = [((1, 2), (2,), 0.0)] * 4
    other = [((1, 2), (2,), 5e-4), ((1, 3), (2,), 9.0), ((1, 2), (1, 1), 0.0),
             ((1, 2), (2,), 2e-3)]
    planners = iter((FakePlanner(plain), FakePlanner(other)))
    monkeypatch.setattr(engine_check, 'Planner', lambda *given, **more: next(planners))
    monkeypatch.setattr(engine_check, 'world_observations', lambda source, clips: range(clips))
    found = check_loop(read_stages(folder), 'maker', source, None, 4)
    assert found == {'clips': 4, 'token_mismatches': 1, 'iteration_mismatches': 1,
                     'trajectory_mismatches': 1, 'largest_deviation_m': 2e-3,
                     'tolerance_m': 1e-3, 'ok': False}  # of other words no path is compared
