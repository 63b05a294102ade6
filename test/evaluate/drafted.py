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
"""A toy target with two toy drafts on disk, for the evaluations that load checkpoints."""

from rspec_planner.model.dflash import Dflash
from rspec_planner.model.draft import dflash_config, eagle3_config
from rspec_planner.model.draft_checkpoint import save_draft, target_digest
from rspec_planner.model.eagle3 import Eagle3
from rspec_planner.train.profiles import new_target
from rspec_planner.train.saving import export


def toy_folders(root):
    """Write a target and drafts; return the target's folder and those of the drafts by name."""
    target, tokenizer = new_target(smoke=True)
    folder = export(target, tokenizer, root / 'target', {'revision': 'r1'})
    digest = target_digest(folder)
    shapes = {'block': Dflash(dflash_config(target.cfg, block=6, window=4)),
              'whole-flat': Dflash(dflash_config(target.cfg, block=6, window=0, taps=(0,))),
              'whole-mirror': Dflash(dflash_config(target.cfg, block=6, window=0, taps=(0,),
                                                   rotary='mirror')),
              'chain': Eagle3(eagle3_config(target.cfg, block=4, window=4))}
    for name, draft in shapes.items():
        draft.initialise(target.text, seed=1)
        save_draft(draft, root / name, {'target': digest})
    return folder, {name: root / name for name in shapes}
