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
Write the stages of a profile as ONNX graphs, and stages.json beside them.

Weights become graph inputs named as they are stored, so no weights are read: a target on the
meta device exports as well as a loaded one. Every node remembers the source line it came from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import hashlib
from importlib import metadata
import json
import logging
from pathlib import Path
from typing import Any
import warnings

import torch
from torch import nn, Tensor

from rspec_planner.engine.onnx_rules import check_graph, OWN_LINE, STACK_TRACE
from rspec_planner.engine.stage_decoder import PrefillStage, VerifyStage
from rspec_planner.engine.stage_draft import draft_stage
from rspec_planner.engine.stage_flow import FlowStage
from rspec_planner.engine.stage_layers import blank, IN_PLACE, Stage
from rspec_planner.engine.stage_narrow import narrow_graph, narrow_ports
from rspec_planner.engine.stage_ops import OPSET, translations
from rspec_planner.engine.stage_vision import VisionStage
from rspec_planner.engine.stages import (
    file_sha256,
    NARROW,
    Port,
    STAGE_NAMES,
    StageFile,
    StageSet,
    StageShapes,
    Weight,
    write_stages,
)
from rspec_planner.model.draft import Draft
from rspec_planner.model.target import Target

TOOLS = ('torch', 'onnx', 'onnxscript')
#: parameters below this name come from the draft's folder, all others from the target's
DRAFT_PREFIX = 'draft.'


def toolchain() -> dict[str, str]:
    """
    Return what makes the graphs: versions, and under 'code' a digest of our own part.

    An export of another toolchain may differ from what would be written now.
    """
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob('engine/stage_*.py'), *package.glob('model/*.py')]):
        digest.update(path.read_bytes())
    return {**{name: metadata.version(name) for name in TOOLS}, 'code': digest.hexdigest()[:12]}


class _WeightsOutside(nn.Module):
    """A stage whose parameters are arguments."""

    def __init__(self, stage: Stage, names: Sequence[str]) -> None:
        super().__init__()
        self._held = (stage, tuple(names))  # in a tuple: not registered as a submodule

    def forward(self, inputs: Mapping[str, Tensor], weights: Sequence[Tensor]) -> Any:
        """Return the outputs of the stage."""
        stage, names = self._held
        return torch.func.functional_call(stage, dict(zip(names, weights)), (inputs,))


def export_stage(stage: Stage, folder: Path, precision: str) -> StageFile:
    """
    Write <name>.onnx into an existing folder and return its description.

    precision: that of the stage, of PRECISIONS. EngineError when the graph breaks a rule, see
    `onnx_rules`.
    """
    inputs = stage.examples()
    weights = {name: blank(*weight.shape, dtype=weight.dtype)
               for name, weight in stage.named_parameters()}
    outputs = _outputs(stage, inputs, weights)
    names = [*inputs, *weights]
    program = _quietly(lambda: torch.onnx.export(
        _WeightsOutside(stage, tuple(weights)).eval(), (inputs, list(weights.values())), None,
        dynamo=True, opset_version=OPSET, custom_translation_table=translations(),
        input_names=names, output_names=list(outputs), verbose=False))
    _separate(program.model.graph)
    _remember_sources(program.model.graph)
    path = folder / f'{stage.name}.onnx'
    operators = _save(program, path, precision)
    given = {**inputs, **weights}
    ports = [_port(name, given[name], weight=_weight(name) if name in weights else None)
             for name in names]
    made = StageFile(
        name=stage.name, file=path.name, sha256=file_sha256(path), bytes=path.stat().st_size,
        opset=OPSET, inputs=narrow_ports(ports, precision),
        outputs=tuple(_port(name, tensor, alias=_alias(name, inputs))
                      for name, tensor in outputs.items()),
        operators=operators)
    check_graph(path, made, precision)
    return made


def _save(program: Any, path: Path, precision: str) -> dict[str, int]:
    """Write a graph, its projections in eight bits if they are; return operator -> nodes."""
    program.save(path)
    if precision in NARROW:
        import onnx
        model = onnx.load(path)
        narrow_graph(model, precision)
        onnx.save(model, path)
        return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))
    return dict(sorted(Counter(node.op_type for node in program.model.graph).items()))


def _outputs(stage: Stage, inputs: Mapping[str, Tensor],
             weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs as fake tensors: names, shapes and dtypes without any arithmetic."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake: list[dict[str, Tensor]] = [
            {name: mode.from_tensor(tensor) for name, tensor in group.items()}
            for group in (inputs, weights)]
        found: dict[str, Tensor] = torch.func.functional_call(stage, fake[1], (fake[0],))
    return found


def _separate(graph: Any) -> None:
    """Rename inner values that carry the name of an input or output, such as `sin`."""
    ports = [*graph.inputs, *graph.outputs]
    taken = {port.name for port in ports}
    for node in graph:
        for value in node.outputs:
            if value.name in taken and not any(value is port for port in ports):
                value.name = f'{value.name}:inner'


def _remember_sources(graph: Any) -> None:
    """Keep of each node's history its line in this package, which is the same everywhere."""
    for node in graph:
        lines = OWN_LINE.findall(node.metadata_props.get(STACK_TRACE, ''))
        node.metadata_props.clear()
        if lines:
            name, number = lines[-1]
            node.metadata_props[STACK_TRACE] = f'File "{name}", line {number}'


def _port(name: str, tensor: Tensor, **more: Any) -> Port:
    return Port(name, str(tensor.dtype).removeprefix('torch.'), tuple(tensor.shape), **more)


def _weight(name: str) -> Weight:
    if name.startswith(DRAFT_PREFIX):
        return Weight('draft', name.removeprefix(DRAFT_PREFIX))
    return Weight('target', name)


def _alias(name: str, inputs: Mapping[str, Tensor]) -> str:
    source = name.removesuffix(IN_PLACE)
    return source if name != source and source in inputs else ''


def _quietly(work: Callable[[], Any]) -> Any:
    """Run an export without its remarks about packages that nothing here needs."""
    logger = logging.getLogger('torch.onnx')
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return work()
    finally:
        logger.setLevel(level)


def export_stages(target: Target, draft: Draft | None, shapes: StageShapes, precision: str,
                  checkpoints: Mapping[str, str], out: str | Path, *,
                  names: Sequence[str] = STAGE_NAMES,
                  progress: Callable[[int, int], None] = lambda done, total: None) -> StageSet:
    """
    Write an export folder and return the content of its stages.json.

    target, draft: in the dtype of the precision; their weights are not read. checkpoints:
    'target', 'draft' -> digest of the weights. names: the stages wanted, without a draft all
    but the draft's.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [stage for stage in make_stages(target, draft, shapes) if stage.name in names]
    files = []
    for index, stage in enumerate(wanted):
        progress(index, len(wanted))
        files.append(export_stage(stage, folder, precision))
    progress(len(wanted), len(wanted))
    config, drafted = json.loads(json.dumps([  # as it reads back: lists, no tuples
        target.cfg.to_dict(), None if draft is None else draft.cfg.to_dict()]))
    stages = StageSet(target.cfg.name, config, drafted, precision, shapes, dict(checkpoints),
                      toolchain(), tuple(files))
    write_stages(stages, folder)
    return stages


def make_stages(target: Target, draft: Draft | None, shapes: StageShapes) -> list[Stage]:
    """Return the stages of a target and its draft, ready to export or to run."""
    drafted = [] if draft is None else [draft_stage(draft, target, shapes)]
    return [VisionStage(target, shapes), PrefillStage(target, shapes), *drafted,
            VerifyStage(target, shapes), FlowStage(target, shapes)]
