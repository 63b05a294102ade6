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
Build message packages with the generators in the ROS wheels: no ament, no CMake, 25 s.

For packages that nobody offers as a wheel, so that a test can put the real thing on the wire.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
import shutil
import subprocess
import sys
import sysconfig

import numpy

PREFIX = Path(sys.prefix)
GENERATORS = ('rosidl_adapter', 'rosidl_generator_c', 'rosidl_generator_py',
              'rosidl_generator_type_description', 'rosidl_typesupport_c',
              'rosidl_typesupport_fastrtps_c')
RUNTIME = ('rosidl_runtime_c', 'rcutils', 'fastcdr', 'rmw', 'rosidl_typesupport_c',
           'rosidl_typesupport_cpp', 'rosidl_typesupport_fastrtps_c',
           'rosidl_typesupport_fastrtps_cpp')


def missing_tools() -> str:
    """Return what the machine lacks for building, '' when nothing."""
    lacking = [name for name in GENERATORS if importlib.util.find_spec(name) is None]
    lacking += [name for name in ('gcc', 'g++') if shutil.which(name) is None]
    if not (Path(sysconfig.get_paths()['include']) / 'Python.h').is_file():
        lacking.append('Python.h')
    if not (PREFIX / 'include/fastcdr/Cdr.h').is_file():
        lacking.append('headers of the ROS wheels')
    return ', '.join(lacking)


class Workspace:
    """Packages under one folder; `python` goes on the path of whoever uses them."""

    def __init__(self, folder: Path) -> None:
        self._source, self._share = folder / 'source', folder / 'share'
        self._include, self._lib = folder / 'include', folder / 'lib'
        self.python = folder / 'python'
        self._lib.mkdir(parents=True)
        os.environ.setdefault('AMENT_PREFIX_PATH', str(PREFIX))

    def build(self, package: str, definitions: dict[str, str]) -> None:
        """Generate and compile a package from message name -> definition."""
        headers, python = self._include / package / package, self.python / package
        self._generate(package, definitions, headers, python)
        details = headers / 'msg' / 'detail'
        self._link(f'lib{package}__rosidl_generator_c.so', [
            path for kind in ('functions', 'description', 'type_support')
            for path in details.glob(f'*__{kind}.c')])
        self._link(f'lib{package}__rosidl_typesupport_fastrtps_c.so',
                   details.glob('*__type_support_c.cpp'))
        self._link(f'lib{package}__rosidl_typesupport_c.so',
                   (headers / 'msg').glob('*__type_support.cpp'))
        self._link(f'lib{package}__rosidl_generator_py.so', (python / 'msg').glob('*_s.c'))
        module = f'{package}_s__rosidl_typesupport_c{sysconfig.get_config_var("EXT_SUFFIX")}'
        self._link(module, python.glob('*.ep.rosidl_typesupport_c.c'))
        (self._lib / module).rename(python / module)

    def _generate(self, package: str, definitions: dict[str, str], headers: Path,
                  python: Path) -> None:
        from rosidl_adapter.msg import convert_msg_to_idl
        from rosidl_generator_c.cli import GenerateC
        from rosidl_generator_py.cli import GeneratePython
        from rosidl_generator_type_description.cli import HashTypeDescription
        from rosidl_typesupport_c.cli import GenerateCTypesupport
        from rosidl_typesupport_fastrtps_c.cli import GenerateFastRTPSCTypesupport
        source, share = self._source / package, self._share / package
        for folder in (source / 'msg', share / 'msg', headers):
            folder.mkdir(parents=True)
        files = []
        for name, definition in definitions.items():
            (source / 'msg' / f'{name}.msg').write_text(definition)
            convert_msg_to_idl(source, package, Path('msg') / f'{name}.msg', share / 'msg')
            files.append(f'{share}:msg/{name}.idl')
        common = (package, files, [str(PREFIX / 'share'), str(self._share)])
        hashes = HashTypeDescription('hash').generate_type_hashes(*common, share)
        GenerateC('c').generate(*common, headers, hashes)
        GenerateFastRTPSCTypesupport('fastrtps_c').generate(*common, headers)
        GenerateCTypesupport('c', typesupport_implementations=[
            'rosidl_typesupport_fastrtps_c']).generate(*common, headers)
        GeneratePython('py', typesupport_implementations=[
            'rosidl_typesupport_c']).generate(*common, python)
        (python / '__init__.py').touch()

    def _link(self, name: str, sources) -> None:
        """Compile sources into a library against everything that exists by now."""
        roots = [PREFIX / 'include', *(PREFIX / 'include').iterdir(), *self._include.iterdir(),
                 Path(sysconfig.get_paths()['include']), Path(numpy.get_include())]
        interfaces = {path for folder in (PREFIX / 'lib', self._lib) for path in
                      folder.glob('lib*_msgs__rosidl_*.so') if path.name != name}
        interfaces |= set((PREFIX / 'lib').glob('libbuiltin_interfaces__rosidl_*.so'))
        libraries = [path for stem in RUNTIME for path in (PREFIX / 'lib').glob(f'lib{stem}.so*')]
        sources = [str(path) for path in sources]
        done = subprocess.run([
            'g++' if sources[0].endswith('.cpp') else 'gcc', '-O0', '-fPIC', '-shared',
            *(f'-I{root}' for root in roots), *sources, '-o', str(self._lib / name),
            '-Wl,--as-needed', f'-Wl,-rpath,{PREFIX / "lib"}:{self._lib}',
            *map(str, sorted(interfaces)), *map(str, libraries)], capture_output=True, text=True)
        assert done.returncode == 0, f'{name}: {done.stderr[:2000]}'
