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
"""Describe the ament_python package; Python libraries are pinned in requirements.txt."""

from pathlib import Path
import re

from setuptools import find_packages, setup

NAME = 'rspec_planner'
ROOT = Path(__file__).resolve().parent
SHARE = f'share/{NAME}'


def version() -> str:
    """Return the version that the package states, so that it stands in one place."""
    text = (ROOT / NAME / '__init__.py').read_text(encoding='utf-8')
    match = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f'{NAME}/__init__.py has no __version__')
    return match.group(1)


def files(folder: str) -> list[str]:
    """Return the files directly in a folder, relative to this one, as setuptools wants them."""
    return sorted(f'{folder}/{path.name}' for path in (ROOT / folder).glob('*')
                  if path.is_file() and not path.name.startswith('.'))


setup(
    name=NAME,
    version=version(),
    packages=find_packages(exclude=['test', 'test.*']),
    package_data={NAME: [f'resource/{NAME}', 'resource/tiny/*',
                         'resource/drafts/*/*', 'engine/kernels/*.cu*']},
    data_files=[
        ('share/ament_index/resource_index/packages', [f'{NAME}/resource/{NAME}']),
        (SHARE, ['package.xml']),
        (f'{SHARE}/launch', files('launch')),
        (f'{SHARE}/config', files('config')),
    ],
    python_requires='>=3.11',
    install_requires=['setuptools'],
    extras_require={'test': ['pytest'], 'fleet': ['ray==2.60.0']},
    zip_safe=False,
    maintainer='rspec_planner authors',
    maintainer_email='dev@rspec-planner.invalid',
    description='Reasoning planner: cameras and ego odometry in, chain of causation and '
                'trajectory out',
    license='Apache-2.0',
    entry_points={
        'console_scripts': [
            'rspec = rspec_planner.cli:main',
            'rspec_planner_node = rspec_planner.__main__:main',
        ],
    },
)
