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
from full_disk import files_of_at_most
import numpy as np
import pytest

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.world.bag import BagReader, BagWriter, message, storage_of

STORED = ['a.mcap', 'a.db3', 'folder']


def write_bag(path, count=5, **options):
    with BagWriter(path, **options) as bag:
        bag.add_topic('/text', 'std_msgs/String')
        bag.add_topic('/latched', 'std_msgs/String', latched=True)
        bag.write('/latched', 1, message('std_msgs/String', data='once'))
        for index in range(count):
            bag.write('/text', 10 + index, message('std_msgs/String', data=f'text {index}'))
    return path


@pytest.mark.parametrize('name', STORED)
def test_what_is_written_is_read_in_log_order(tmp_path, name):
    path = write_bag(tmp_path / name)
    with BagReader(path) as bag:
        assert bag.topics == {'/latched': 'std_msgs/msg/String', '/text': 'std_msgs/msg/String'}
        assert bag.message_count == 6
        got = [(m.topic, m.log_ns, m.content.data) for m in bag.read()]
        assert [m.content.data for m in bag.read(('/latched',))] == ['once']
    assert got == [('/latched', 1, 'once'),
                   *(('/text', 10 + i, f'text {i}') for i in range(5))]
    assert path.is_dir() == (name == 'folder')
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]  # no temporary folder is left


def test_single_mcap_file_opens_with_the_mcap_readers(tmp_path):
    from mcap.reader import make_reader
    from mcap_ros2.decoder import DecoderFactory
    path = write_bag(tmp_path / 'a.mcap')
    with path.open('rb') as stream:
        reader = make_reader(stream, decoder_factories=[DecoderFactory()])
        got = [m.decoded_message.data for m in reader.iter_decoded_messages(topics=['/text'])]
    assert got == [f'text {i}' for i in range(5)]


@pytest.mark.parametrize('name', STORED)
def test_the_same_calls_give_the_same_bytes(tmp_path, name):
    first, second = write_bag(tmp_path / 'x' / name), write_bag(tmp_path / 'y' / name)
    files = [first] if first.is_file() else sorted(first.iterdir())
    assert files
    for file in files:
        twin = second if second.is_file() else second / file.name
        assert file.read_bytes() == twin.read_bytes()


def test_storage_follows_suffix_then_choice(tmp_path):
    assert storage_of(tmp_path / 'a.mcap') == 'mcap'
    assert storage_of(tmp_path / 'a.db3') == 'sqlite3'
    assert storage_of(tmp_path / 'a') == 'sqlite3'
    assert storage_of(tmp_path / 'a', 'mcap') == 'mcap'
    write_bag(tmp_path / 'a', storage='mcap')
    assert (tmp_path / 'a' / 'a.mcap').is_file()
    with pytest.raises(ConfigurationError, match='contradicts'):
        storage_of(tmp_path / 'a.mcap', 'sqlite3')
    with pytest.raises(ConfigurationError, match="'zip' is unknown"):
        storage_of(tmp_path / 'a', 'zip')


@pytest.mark.parametrize('name', STORED)
def test_existing_bags_are_kept_unless_told(tmp_path, name):
    path = write_bag(tmp_path / name)
    with pytest.raises(InputError, match='exists already'):
        write_bag(path)
    write_bag(path, count=2, overwrite=True)
    with BagReader(path) as bag:
        assert bag.message_count == 3


def test_a_failed_recording_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), BagWriter(tmp_path / 'a.mcap') as bag:
        bag.add_topic('/text', 'std_msgs/String')
        raise RuntimeError('stop')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('name', ['a.mcap', 'a.db3'])
@pytest.mark.parametrize('keep', [0.2, 0.6, 0.95])
def test_truncated_bags_are_named(tmp_path, name, keep):
    path = tmp_path / name
    with BagWriter(path) as bag:
        bag.add_topic('/image', 'sensor_msgs/CompressedImage')
        noise = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
        stamp = message('builtin_interfaces/Time', sec=1, nanosec=2)
        header = message('std_msgs/Header', stamp=stamp, frame_id='')
        for index in range(30):
            bag.write('/image', index, message('sensor_msgs/CompressedImage', header=header,
                                               format='jpeg', data=noise))
    data = path.read_bytes()
    path.write_bytes(data[:int(len(data) * keep)])
    with pytest.raises(InputError, match=f'{name}.*(truncated|damaged)') as caught:
        with BagReader(path) as bag:
            list(bag.read())
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('name, content, says', [
    ('missing.mcap', None, 'does not exist'),
    ('empty.mcap', b'', 'empty file'),
    ('text.mcap', b'hello, this is no bag at all, but it is long enough to be read', 'damaged'),
    ('text.db3', b'hello, this is no bag at all' * 50, 'damaged'),
    ('picture.png', b'\x89PNG', 'neither .mcap nor .db3'),
])
def test_files_that_are_no_bags_are_named(tmp_path, name, content, says):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        with BagReader(path) as bag:
            list(bag.read())
    assert name in str(caught.value)
    assert '\n' not in str(caught.value)


def test_folders_need_sound_metadata(tmp_path):
    (tmp_path / 'bare').mkdir()
    with pytest.raises(InputError, match='no metadata.yaml'):
        BagReader(tmp_path / 'bare').__enter__()
    bag = write_bag(tmp_path / 'bag')
    (bag / 'metadata.yaml').write_text('rosbag2_bagfile_information: {version: 9}')
    with pytest.raises(InputError, match='damaged'):
        BagReader(bag).__enter__()
    (bag / 'metadata.yaml').write_text('- {')
    with pytest.raises(InputError, match='damaged') as caught:
        BagReader(bag).__enter__()
    assert '\n' not in str(caught.value)
    assert 'sqlite3' not in str(caught.value)  # which cannot open a folder


def test_a_bag_without_messages_opens_and_yields_nothing(tmp_path):
    for name in STORED:
        with BagWriter(tmp_path / name):
            pass
        with BagReader(tmp_path / name) as bag:
            assert bag.topics == {}
            assert list(bag.read()) == []


@pytest.mark.parametrize('name', ['full.mcap', 'full.db3', 'folder'])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, name):
    """The limit on the size of a file stands for the disk: both libraries raise their own."""
    told = f'bag .*{name} cannot be written .*free disk sp'
    with files_of_at_most(60_000), pytest.raises(InputError, match=told):
        with BagWriter(tmp_path / name) as writer:
            writer.add_topic('/text', 'std_msgs/String')
            for count in range(200):
                writer.write('/text', count, message('std_msgs/String', data='x' * 9999))
    assert list(tmp_path.iterdir()) == []
