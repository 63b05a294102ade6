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
"""`rspec profiles`: the targets by name, their size, and what runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from rspec_planner.cli_report import reports

#: name -> what there is of it
WEIGHTS = {'tiny': 'shipped with the package', 'alpamayo-r1': "the user's folder, or random",
           'alpamayo-1.5': "the user's folder, or random", 'autovla-tiny': 'random',
           'autovla': 'random'}


def _table(report: Any) -> Iterator[str]:
    for row in report['profiles']:
        yield (f'{row["name"]:<13} {row["parameters"] / 1e6:>9.1f} M  '
               f'{row["visual_tokens"]:>5} visual tokens  says {row["says"]}')
        yield f'{"":<13} rotary {row["rotary"]}; weights: {row["weights"]}; runs on: {row["runs"]}'


def _row(cfg: Any, model: Any, says: str, runs: str) -> dict[str, Any]:
    text = cfg.text
    return {'name': cfg.name, 'parameters': model.num_parameters(),
            'visual_tokens': cfg.num_images * cfg.tokens_per_image,
            'vocabulary': text.vocab_size, 'layers': text.num_layers,
            'hidden_size': text.hidden_size, 'says': says, 'runs': runs,
            'rotary': 'interleaved' if text.mrope_interleaved else 'in sections',
            'weights': WEIGHTS[cfg.name]}


@click.command('profiles')
@reports(_table)
def profiles() -> Mapping[str, Any]:
    """List the targets: size, prompt, what they say and what runs them."""
    import torch

    from rspec_planner.evaluate.autovla_profiles import autovla_profile, AUTOVLA_PROFILES
    from rspec_planner.model.autovla import AutoVla
    from rspec_planner.model.checkpoint import load_target
    from rspec_planner.model.config import alpamayo_1_5, alpamayo_r1
    from rspec_planner.model.target import Target
    from rspec_planner.planner.drafts import EMBEDDED
    flow = ('reasoning; a flow expert drives', 'node, benches, engines')
    spoken = ('reasoning and actions of a codebook', 'bench decode')
    rows = []
    with torch.device('meta'):  # shapes without memory
        for cfg in (load_target(EMBEDDED / 'tiny').cfg, alpamayo_r1(), alpamayo_1_5()):
            rows.append(_row(cfg, Target(cfg), *flow))
        for name in AUTOVLA_PROFILES:
            own = autovla_profile(name)
            rows.append(_row(own, AutoVla(own), *spoken))
    return {'profiles': rows}
