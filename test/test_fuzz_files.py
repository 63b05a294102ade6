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
Damaged and hostile files: bags, YAML, manifests, safetensors, checkpoint and engine folders.

RSPEC_FUZZ_EXAMPLES says how many of each. A file may be refused in one line (RspecError) or be
read; it may raise nothing else, run nothing, and reach nothing outside its folder.
"""

import json
import os
from pathlib import Path
import re
import shutil
import struct

from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
import pytest
import yaml

from rspec_planner.bag_topics import TopicNames
from rspec_planner.engine.engine_manifest import list_manifests
from rspec_planner.engine.engine_manifest import read_manifest as engine_manifest
from rspec_planner.errors import RspecError
from rspec_planner.model.checkpoint import load_target, read_files, read_weights
from rspec_planner.model.draft_checkpoint import load_draft
from rspec_planner.parameters import load_yaml_parameters, NodeParameters, value_problems
from rspec_planner.planner.checkpoints import folder_profile
from rspec_planner.planner.drafts import EMBEDDED
from rspec_planner.planner.tokenizer import load_tokenizer
from rspec_planner.transport import config_path
from rspec_planner.world.bag import BagReader, BagWriter, message

EXAMPLES = int(os.environ.get('RSPEC_FUZZ_EXAMPLES', '40'))
FUZZ = settings(max_examples=EXAMPLES, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))
TINY = EMBEDDED / 'tiny'

leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
trees = st.recursive(leaves, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=12), inner, max_size=4)),
    max_leaves=12)


@st.composite
def damaged(draw, data):
    """Return bytes with a cut, some flips, an insertion, or none of the original."""
    changed = bytearray(data)
    kind = draw(st.sampled_from(['cut', 'flip', 'insert', 'zero', 'other']))
    if kind == 'other':
        return draw(st.binary(max_size=200))
    at = draw(st.integers(0, max(len(changed) - 1, 0)))
    if kind == 'cut':
        return bytes(changed[:at])
    if kind == 'insert':
        return bytes(changed[:at]) + draw(st.binary(min_size=1, max_size=40)) + bytes(changed[at:])
    for _ in range(draw(st.integers(1, 20))):
        changed[draw(st.integers(0, len(changed) - 1))] = 0 if kind == 'zero' \
            else draw(st.integers(0, 255))
    return bytes(changed)


def refused_or_read(function):
    """Call; an RspecError must be one line."""
    try:
        return function()
    except RspecError as error:
        assert str(error) and '\n' not in str(error)
        return None


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('fuzz')


SHIPPED = config_path('rspec_planner.param.yaml').read_bytes()


@FUZZ
@given(data=st.one_of(damaged(SHIPPED), trees.map(lambda tree: yaml.safe_dump(tree).encode()),
                      st.binary(max_size=300)))
def test_parameter_files(folder, data):
    path = folder / 'p.yaml'
    path.write_bytes(data)
    values = refused_or_read(lambda: load_yaml_parameters(path))
    if values is not None:
        refused_or_read(lambda: NodeParameters.from_values(values))


@pytest.mark.parametrize('text', [
    '!!python/object/apply:os.system ["touch {0}"]', '!!python/name:os.system',
    'a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]', '? [a]\n: b', '/**:\n  ros__parameters: [1]',
    '/**: {ros__parameters: {model: {checkpoint: [1]}}}', '- ' * 3000, '[' * 100_000])
def test_yaml_runs_nothing(folder, text):
    mark, path = folder / 'executed', folder / 'evil.yaml'
    path.write_text(text.format(mark) if '{0}' in text else text)
    assert refused_or_read(lambda: load_yaml_parameters(path)) is None
    assert not mark.exists()


@FUZZ
@given(data=st.one_of(trees.map(lambda tree: yaml.safe_dump(tree).encode()),
                      st.binary(max_size=200)))
def test_topic_mappings(folder, data):
    path = folder / 't.yaml'
    path.write_bytes(data)
    refused_or_read(lambda: TopicNames.read(path, ('front_wide', 'front_tele')))


@pytest.fixture(scope='module', params=['.mcap', '.db3'])
def bag(request, folder):
    path = folder / f'whole{request.param}'
    with BagWriter(path) as writer:
        writer.add_topic('/text', 'std_msgs/String')
        for index in range(20):
            writer.write('/text', 10**9 + index, message('std_msgs/String', data='x' * 50))
    return path


@FUZZ
@given(drawn=st.data())
def test_bags(bag, folder, drawn):
    path = folder / f'damaged{bag.suffix}'
    path.write_bytes(drawn.draw(damaged(bag.read_bytes())))

    def read():
        with BagReader(path) as reader:
            assert reader.message_count >= 0 and reader.topics is not None
            return [item.content for item in reader.read()]
    refused_or_read(read)


@pytest.fixture(scope='module')
def checkpoint(folder):
    """Return a folder with the tiny config and manifest, and one small tensor file."""
    path = folder / 'checkpoint'
    shutil.copytree(TINY, path)
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    return path


def with_file(folder, name, data, function):
    """Call a function while one file of a folder holds other bytes."""
    path = folder / name
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        return refused_or_read(function)
    finally:
        path.write_bytes(before)


MANIFEST = (TINY / 'manifest.json').read_bytes()


@FUZZ
@given(data=st.one_of(damaged(MANIFEST), trees.map(lambda tree: json.dumps(tree).encode()),
                      st.dictionaries(st.text(max_size=30), leaves, max_size=4).map(
                          lambda files: json.dumps({'files': files}).encode())))
def test_checkpoint_manifests(checkpoint, data):
    with_file(checkpoint, 'manifest.json', data, lambda: read_files(checkpoint))


@pytest.mark.parametrize('name', ['manifest.json', 'config.json', 'tokenizer.json'])
@pytest.mark.parametrize('text', ['[' * 100_000, '{"a":' * 100_000, '1' * 10_000, '\ud800', ''])
def test_json_that_is_too_deep_or_too_long(checkpoint, name, text):
    data = text.encode('utf-8', 'surrogatepass')
    before = (checkpoint / 'manifest.json').read_bytes()
    if name != 'manifest.json':
        (checkpoint / 'manifest.json').write_bytes(signed(checkpoint, name, data))
    read = load_tokenizer if name == 'tokenizer.json' else load_target
    try:
        assert with_file(checkpoint, name, data, lambda: read(checkpoint)) is None
    finally:
        (checkpoint / 'manifest.json').write_bytes(before)


@pytest.mark.parametrize('name', ['../outside', '/etc/passwd', 'a/../../outside', '', '.', '..',
                                  'link', 'sub/file', '\x00', 'config.json\x00'])
def test_no_manifest_leads_out_of_its_folder(checkpoint, folder, name):
    (folder / 'outside').write_bytes(b'secret')
    link = checkpoint / 'link'
    if not link.is_symlink():
        link.symlink_to('/etc/passwd')
    content = json.dumps({'files': {name: '0' * 64, 'config.json': '0' * 64}})
    seen = []

    def read():
        seen.append(read_files(checkpoint))
    with_file(checkpoint, 'manifest.json', content.encode(), read)
    assert seen == []


def signed(checkpoint, name, data):
    """Return a manifest that vouches for other bytes of one file, as an attacker's would."""
    import hashlib
    content = json.loads(MANIFEST)
    content['files'][name] = hashlib.sha256(data).hexdigest()
    return json.dumps(content).encode()


SHARD = 'model-00002-of-00002.safetensors'
WHOLE = (TINY / SHARD).read_bytes()
HEADER = struct.unpack('<Q', WHOLE[:8])[0]


@st.composite
def headers(draw):
    """Return a safetensors file whose header is damaged, or made up."""
    body = WHOLE[8 + HEADER:8 + HEADER + 4096]
    text = draw(st.one_of(
        damaged(WHOLE[8:8 + HEADER]), trees.map(lambda tree: json.dumps(tree).encode()),
        st.dictionaries(st.text(max_size=10), st.fixed_dictionaries({
            'dtype': st.one_of(st.sampled_from(['F16', 'F32', 'I64', 'BOOL', 'X9']), leaves),
            'shape': st.lists(st.integers(-4, 2**40), max_size=4),
            'data_offsets': st.lists(st.integers(-10, 2**62), max_size=3)}), max_size=3).map(
                lambda tensors: json.dumps(tensors).encode())))
    length = draw(st.one_of(st.just(len(text)), st.integers(0, 2**64 - 1), st.just(2**62)))
    return struct.pack('<Q', length) + text + body


@FUZZ
@given(data=headers())
def test_safetensors_headers(checkpoint, data):
    """The hash is right: whoever made the folder also made the manifest."""
    before = (checkpoint / 'manifest.json').read_bytes()
    (checkpoint / 'manifest.json').write_bytes(signed(checkpoint, SHARD, data))
    try:
        assert with_file(checkpoint, SHARD, data, lambda: load_target(checkpoint)) is None
    finally:
        (checkpoint / 'manifest.json').write_bytes(before)


CONFIG = (TINY / 'config.json').read_bytes()


@st.composite
def configs(draw):
    """Return the shipped profile with one value replaced, or something else altogether."""
    if draw(st.booleans()):
        return draw(damaged(CONFIG))
    tree = json.loads(CONFIG)
    place, key = tree, draw(st.sampled_from(sorted(tree)))
    while isinstance(place[key], dict) and place[key] and draw(st.booleans()):
        place = place[key]
        key = draw(st.sampled_from(sorted(place)))
    # small numbers: what memory a profile may ask for is a matter of its own
    place[key] = draw(st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.floats(-2, 2),
                                st.text(max_size=8), st.lists(st.integers(-2, 9), max_size=4)))
    return json.dumps(tree).encode()


@FUZZ
@given(data=configs())
def test_profiles(checkpoint, data):
    before = (checkpoint / 'manifest.json').read_bytes()
    (checkpoint / 'manifest.json').write_bytes(signed(checkpoint, 'config.json', data))
    try:
        with_file(checkpoint, 'config.json', data, lambda: load_target(checkpoint))
    finally:
        (checkpoint / 'manifest.json').write_bytes(before)


TOKENIZER = (TINY / 'tokenizer.json').read_bytes()


@FUZZ
@given(data=st.one_of(damaged(TOKENIZER), trees.map(lambda tree: json.dumps(tree).encode())))
def test_tokenizers(checkpoint, data):
    with_file(checkpoint, 'tokenizer.json', data, lambda: load_tokenizer(checkpoint))


@pytest.fixture(scope='module')
def engines(folder):
    path = folder / 'engines'
    path.mkdir()
    return path


@FUZZ
@given(tree=st.one_of(trees, st.fixed_dictionaries({
    'schema': st.one_of(st.integers(0, 9), leaves), 'stage': leaves, 'flavour': leaves,
    'bytes': leaves, 'sha256': leaves, 'inputs': trees, 'outputs': trees})))
def test_engine_manifests(engines, tree):
    path = engines / 'verify.tensorrt.json'
    for data in (json.dumps(tree).encode(), json.dumps(tree).encode()[:-1]):
        path.write_bytes(data)
        refused_or_read(lambda: engine_manifest(engines, 'verify', 'tensorrt'))
        refused_or_read(lambda: list_manifests(engines))


def test_pickles_and_code_in_a_folder_are_left_alone(checkpoint, folder):
    """Nothing but what the manifest lists is opened, and nothing is executed."""
    mark = folder / 'ran'
    for name in ('modeling.py', 'conftest.py', '__init__.py', 'setup.py', 'sitecustomize.py'):
        (checkpoint / name).write_text(f'open({str(mark)!r}, "w").close()')
    (checkpoint / 'pytorch_model.bin').write_bytes(
        b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    tensors, config = read_weights(checkpoint)
    assert tensors and config and not mark.exists()
    target = load_target(checkpoint)
    refused_or_read(lambda: load_draft(checkpoint, target))
    assert not mark.exists()


#: allowed: an exception's name of pickle, for what torch.load raises
_UNPICKLING = {'saving.py'}
SUSPECT = re.compile(r'pickle|dill|shelve|marshal|eval\(|exec\(|system|popen|yaml|\.load\(|shell')
_FORBIDDEN = {'eval', 'exec', 'os.system', 'os.popen', 'yaml.load', 'yaml.unsafe_load'}
_LOADERS = {'torch.load': 'weights_only=True', 'np.load': 'allow_pickle=False',
            'numpy.load': 'allow_pickle=False'}


def test_no_source_of_ours_unpickles_or_calls_a_shell():
    """What could run a stranger's bytes does not occur; torch.load only with weights_only."""
    import ast
    root = Path(__file__).parent.parent / 'rspec_planner'
    found = []
    for path in root.rglob('*.py'):
        text = path.read_text(encoding='utf-8')
        if not SUSPECT.search(text):  # parsing all of them takes long
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) \
                else [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            found += [f'{path.name}: import {name}' for name in names
                      if name.split('.')[0] in ('pickle', 'dill', 'shelve', 'marshal')
                      and path.name not in _UNPICKLING]
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func) if isinstance(node.func, ast.Name) or isinstance(
                    node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ''
                shell = any(keyword.arg == 'shell' for keyword in node.keywords)
                if name in _FORBIDDEN or shell or (
                        name in _LOADERS and _LOADERS[name] not in ast.unparse(node)):
                    found.append(f'{path.name}:{node.lineno}: {name}')
    assert found == []




@pytest.mark.parametrize('read', [
    load_yaml_parameters, lambda path: TopicNames.read(path, ('front_wide',))],
    ids=['parameters', 'topics'])
def test_yaml_that_unfolds_or_never_ends(folder, read):
    """Aliases of aliases took minutes and then the memory, a link to /dev/zero likewise."""
    path = folder / 'laugh.yaml'
    lines = ['/**:', '  ros__parameters:', '    a0: &a0 {x: 1}']
    lines += [f'    a{i}: &a{i} {{{", ".join(f"k{j}: *a{i - 1}" for j in range(10))}}}'
              for i in range(1, 12)]
    path.write_text('\n'.join(lines), encoding='utf-8')
    with pytest.raises(RspecError, match=r'is not YAML: alias \*a0: write the value out'):
        read(path)
    path.unlink()
    path.symlink_to('/dev/zero')
    with pytest.raises(RspecError, match=r'cannot be read \(more than 1048576 bytes\)'):
        read(path)
    path.unlink()


@pytest.mark.parametrize('key, value', [
    ('guard.fallback', 'x' * 10**6), ('y' * 10**6, 1), ('model.device', 'cpu\n\x1b[2J'),
    ('bad\nkey', 1), ('planning.rate_hz', 10**4000), ('model.seed', ['z' * 10**6] * 9)])
def test_a_refusal_is_short_whatever_was_given(key, value):
    [problem] = value_problems({key: value}, 'a test')
    assert problem.isprintable() and len(problem) < 400


@pytest.mark.parametrize('name', ['manifest.json', 'config.json'])
def test_json_that_never_ends(checkpoint, folder, name):
    copy = folder / f'endless_{name}'
    shutil.copytree(checkpoint, copy)
    (copy / name).unlink()
    (copy / name).symlink_to('/dev/zero')
    with pytest.raises(RspecError, match=r'cannot be read \(more than 33554432 bytes\)'):
        (folder_profile if name == 'config.json' else read_files)(copy)
