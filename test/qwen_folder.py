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
"""A tokenizer folder laid out like Qwen3-VL's, for tests; see the module that writes it."""

from rspec_planner.evaluate.synthetic_tokenizer import (
    ADDED,
    CORPUS,
    SPLIT,
    TEXT_ROWS,
    write_tokenizer_folder,
)

__all__ = ['ADDED', 'CORPUS', 'SPLIT', 'TEXT_ROWS', 'write_tokenizer_folder']
