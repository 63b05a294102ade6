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
"""A user points the planner at a released folder and gets a plan; weights are noise, ids real."""

import json
import shutil

from click.testing import CliRunner
import pytest
from qwen_folder import write_tokenizer_folder
import torch
from upstream_rig import edit_config, edit_shard, IMAGE_PAD, released_profile

from rspec_planner.cli import cli
from rspec_planner.errors import EngineError
from rspec_planner.evaluate.bench import bench_frame
from rspec_planner.evaluate.synthetic_checkpoint import write_checkpoint
from rspec_planner.loading import engine_values, load_planner, warm_up, warm_up_observation
from rspec_planner.model.draft_checkpoint import target_digest
from rspec_planner.parameters import load_yaml_parameters, NodeParameters, PARAMETER_FILE
from rspec_planner.planner.pipeline import Planner
from rspec_planner.planner.prompt import build_prompt
from rspec_planner.transport import config_path
from rspec_planner.world.drive import Drive
from rspec_planner.world.record import record_world, RecordOptions
from rspec_planner.world.rig import Rig

#: cameras of 16:9, as the released models expect them
RIG = Rig(width=576, height=320)


@pytest.fixture(scope='module')
def tokenizer_folder(tmp_path_factory):
    return write_tokenizer_folder(tmp_path_factory.mktemp('qwen'))


@pytest.fixture(scope='module', params=['alpamayo_r1', 'alpamayo1_5'])
def folder(request, tmp_path_factory, tokenizer_folder):
    made = tmp_path_factory.mktemp(request.param)
    write_checkpoint(made, released_profile(), request.param, shards=2)
    (made / 'tokenizer.json').write_bytes((tokenizer_folder / 'tokenizer.json').read_bytes())
    return made


def test_a_released_folder_gives_a_plan(folder):
    planner = Planner.load(folder, draft='default', max_reasoning_tokens=6)
    assert planner.draft_name == '' and planner.precision == 'float32'
    profile = planner.profile
    assert (profile.cameras.height, profile.cameras.width) == (64, 96)
    plan = planner.plan(warm_up_observation(profile))
    assert len(plan.reasoning.token_ids) == 6
    assert plan.verdict.reason == 'reasoning_incomplete'  # noise never says that it is done
    assert torch.tensor(plan.poses).isfinite().all()
    forbidden = range(profile.tokens.forbidden_start, profile.tokens.forbidden_end)
    assert not set(plan.reasoning.token_ids) & set(forbidden)


def test_the_prompt_is_that_of_the_model(folder):
    planner = Planner.load(folder, draft=None)
    profile = planner.profile
    observation = warm_up_observation(profile)
    ids = build_prompt(profile, planner.tokenizer, observation.ego_poses).token_ids.tolist()
    labelled = profile.name == 'alpamayo-1.5'
    assert (profile.prompt.camera_names, profile.prompt.frame_numbers) == (labelled, labelled)
    assert ids.count(IMAGE_PAD) == 16 * 6
    assert profile.tokens.cot_start == 155_677 == ids[-1]
    bins = [i for i in ids if 154_669 <= i <= 155_668]
    assert len(bins) == 48


def test_bfloat16_on_request(folder):
    target = Planner.load(folder, draft=None, dtype=torch.bfloat16)
    assert target.precision == 'bfloat16'


def test_a_folder_without_a_tokenizer_says_where_to_put_one(folder, tmp_path):
    for path in folder.iterdir():
        if path.name != 'tokenizer.json':
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(EngineError, match='tokenizer.json.*Qwen3-VL-8B-Instruct.*tokenizer'):
        Planner.load(tmp_path)
    (tmp_path / 'tokenizer').mkdir()
    (tmp_path / 'tokenizer/tokenizer.json').write_bytes((folder / 'tokenizer.json').read_bytes())
    assert Planner.load(tmp_path, draft=None).profile.name.startswith('alpamayo')


def test_a_tokenizer_with_other_ids_is_refused(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / 'config.json').read_text())
    config['vlm_config']['image_token_id'] = 151_654
    edit_config(tmp_path, **config)
    with pytest.raises(EngineError, match='image_pad is 151655.*says 151654'):
        Planner.load(tmp_path, draft=None)


@pytest.fixture
def decided(folder, tmp_path):
    """Return a copy that says one word and <|traj_future_start|>, on a nearly straight path."""
    copy = shutil.copytree(folder, tmp_path / 'decided')

    def decide(tensors):
        # every token asks for the end; the last one of the prompt asks louder for a word
        for name, row, column, value in (
                ('embed_tokens', slice(None), 0, 60.0), ('embed_tokens', slice(None), 1, 0.0),
                ('embed_tokens', 155_677, 1, 60.0), ('lm_head', slice(None), slice(0, 2), 0.0),
                ('lm_head', 155_681, 0, 60.0), ('lm_head', 32, 1, 120.0)):
            for key in [key for key in tensors if key.endswith(f'{name}.weight')]:
                tensors[key][row, column] = value

    for number in (0, 1):
        edit_shard(copy, decide, number)
    config = json.loads((copy / 'config.json').read_text())
    edit_config(copy, action_space_cfg={**config['action_space_cfg'], 'curvature_std': 1e-4,
                                        'accel_std': 0.1})
    return copy


def test_the_command_plans_a_bag_with_it(decided, tmp_path):
    bag = tmp_path / 'drive.mcap'
    record_world(bag, Drive(('crosswalk',), 1, rig=RIG), 2.2, RecordOptions(encoding='jpeg'),
                 rig=RIG)
    done = CliRunner().invoke(cli, ['plan', str(bag), '--checkpoint', str(decided), '--json'])
    assert done.exit_code == 0, done.output + str(done.exception)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report['plans'] >= 2
    plans = [json.loads(line) for line in open(report['records'], encoding='utf-8')]
    assert all(plan['complete'] and plan['tokens'][-1] == 155_681 for plan in plans)
    assert all(len(plan['poses']) == 65 for plan in plans)


def test_noise_that_never_decides_is_not_driven(folder, tmp_path):
    planner = Planner.load(folder, max_reasoning_tokens=4)
    verdict = planner.plan(warm_up_observation(planner.profile)).verdict
    assert (verdict.accepted, verdict.reason) == (False, 'reasoning_incomplete')


def test_the_node_s_loader_takes_it(decided):
    values = load_yaml_parameters(config_path(PARAMETER_FILE))
    parameters = NodeParameters.from_values(values | {'model.checkpoint': str(decided)})
    planner = load_planner(parameters)
    assert warm_up(planner) > 0
    facts = engine_values(planner, parameters, {})
    assert facts['profile'] == planner.profile.name
    assert facts['manifest_sha256'] == target_digest(decided)
    plan = planner.plan(warm_up_observation(planner.profile))
    assert plan.verdict.accepted and len(plan.poses) == 65


def test_the_bench_times_frames_on_it(folder):
    report = bench_frame('', 'cpu', 1, checkpoint=folder, loop='while', warm_up=0,
                         tokens=3)
    assert report['profile'].startswith('alpamayo') and report['draft'] == ''
    assert report['token_mismatches'] == 0 and report['precision'] == 'float32'
    assert report['tokens'] == 3
