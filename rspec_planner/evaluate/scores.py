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
"""Score clips one by one, then sum them up with intervals, halves, families and parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rspec_planner.evaluate.baselines import constant_velocity
from rspec_planner.evaluate.metrics import (
    ade,
    agrees,
    bootstrap_mean,
    box_corners,
    boxes_overlap,
    wilson,
)
from rspec_planner.world.clip import Clip, ClipSpec
from rspec_planner.world.reasoning import acceptable, attribute_matches, parse_decision

#: ego footprint of the embedded world: metres ahead of and behind the rear axle, and width
EGO_FRONT, EGO_REAR, EGO_WIDTH = 3.7, -0.9, 1.8


@dataclass(frozen=True)
class Answer:
    """What one variant of the target said and drove for one clip."""

    right: bool  # decision as the expert's
    attributes_right: int
    attributes_said: int
    agreement: bool | None  # the speed profile does what the action word says
    ade_m: float  # first sample
    min_ade6_m: float  # best of all samples; blind variants have one
    fde_m: float  # first sample at 6.4 s
    collision: bool  # the first sample touches a recorded agent
    text: str


@dataclass(frozen=True)
class ClipScore:
    """All variants of one clip; clips are judged against the expert's drive."""

    spec: ClipSpec
    answers: dict[str, Answer]  # by sight: 'camera', 'black', 'none'
    constant_velocity_m: float
    expert_agreement: bool | None


def answer_of(clip: Clip, text: str, xy: np.ndarray, speeds: np.ndarray) -> Answer:
    """Score one reasoning text with K trajectories (K, 64, 2) m and speeds (K, 64) m/s."""
    truth = clip.future[:, :2].astype(np.float64)
    errors = ade(xy, truth)
    matched, said = attribute_matches(clip.decision, text)
    decision = parse_decision(text)
    return Answer(
        right=acceptable(clip.decision, text), attributes_right=matched, attributes_said=said,
        agreement=None if decision is None else agrees(decision[0], speeds[0], clip.speed),
        ade_m=float(errors[0]), min_ade6_m=float(errors.min()),
        fde_m=float(np.linalg.norm(xy[0, -1] - truth[-1])),
        collision=collides(xy[0], clip.agents), text=text)


def collides(path: np.ndarray, agents: np.ndarray) -> bool:
    """Tell whether the ego box along a path (64, 2) touches an agent box of (80, n, 7)."""
    future = agents[-len(path):].astype(np.float64)
    if future.shape[1] == 0:
        return False
    step = np.diff(np.concatenate([np.zeros((1, 2)), path]), axis=0)
    yaw = np.zeros(len(path))
    for i, (dx, dy) in enumerate(step):  # a standing vehicle keeps its heading
        yaw[i] = np.arctan2(dy, dx) if np.hypot(dx, dy) > 0.02 else yaw[max(i - 1, 0)]
    middle = 0.5 * (EGO_FRONT + EGO_REAR)
    ego = box_corners(path[:, 0] + middle * np.cos(yaw), path[:, 1] + middle * np.sin(yaw), yaw,
                      np.full(len(path), EGO_FRONT - EGO_REAR), np.full(len(path), EGO_WIDTH))
    boxes = box_corners(*(future[..., k] for k in range(5)))
    return bool(boxes_overlap(ego[:, None], boxes).any())


def score_of(clip: Clip, answers: dict[str, Answer]) -> ClipScore:
    """Return the score of one clip from its scored answers."""
    straight = constant_velocity(np.array([clip.speed]), len(clip.future))[0]
    return ClipScore(clip.spec, answers,
                     float(ade(straight, clip.future[:, :2].astype(np.float64))),
                     agrees(clip.decision.action, clip.speeds, clip.speed))


def _rate(values: Iterable[bool | None]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    return wilson(sum(known), len(known)).to_dict()


def _pairs(scores: list[ClipScore], sight: str) -> dict[str, float]:
    """Return the rate of pairs with both twins right."""
    grouped: dict[str, list[bool]] = {}
    for score in scores:
        grouped.setdefault(score.spec.pair_id, []).append(score.answers[sight].right)
    return _rate(all(right) for right in grouped.values() if len(right) == 2)


def summary_of(scores: list[ClipScore], sight: str) -> dict[str, Any]:
    """Return the metrics of one variant, each a dict of value, low, high and n."""
    answers = [score.answers[sight] for score in scores]
    said = sum(answer.attributes_said for answer in answers)
    return {
        'min_ade': bootstrap_mean(np.array([a.ade_m for a in answers])).to_dict(),
        'min_ade6': bootstrap_mean(np.array([a.min_ade6_m for a in answers])).to_dict(),
        'fde': bootstrap_mean(np.array([a.fde_m for a in answers])).to_dict(),
        'decision': _rate(a.right for a in answers),
        'pair': _pairs(scores, sight),
        'attributes': wilson(sum(a.attributes_right for a in answers), said).to_dict(),
        'agreement': _rate(a.agreement for a in answers),
        'collision': _rate(a.collision for a in answers),
    }


def brief_of(scores: list[ClipScore]) -> dict[str, float]:
    """
    Return the few numbers that a table row of a family, part or half shows.

    A group without whole pairs, such as the event half, has no `pair_accuracy`.
    """
    answers = [score.answers['camera'] for score in scores]
    pairs = _pairs(scores, 'camera')
    return {
        'clips': len(scores),
        'decision_accuracy': _rate(a.right for a in answers)['value'],
        **({'pair_accuracy': pairs['value']} if pairs['n'] else {}),
        'min_ade_m': bootstrap_mean(np.array([a.ade_m for a in answers])).to_dict()['value'],
        'constant_velocity_m': round(float(np.mean([s.constant_velocity_m for s in scores])), 5),
        'black_m': round(float(np.mean([s.answers['black'].ade_m for s in scores])), 5),
    }


def grouped_briefs(scores: list[ClipScore],
                   key: Callable[[ClipSpec], str]) -> dict[str, dict[str, float]]:
    """Return `brief_of` for each value of key, in order of appearance."""
    groups: dict[str, list[ClipScore]] = {}
    for score in scores:
        groups.setdefault(key(score.spec), []).append(score)
    return {name: brief_of(members) for name, members in groups.items()}


def split_report(scores: list[ClipScore]) -> dict[str, Any]:
    """Return everything about one split; flat keys first, they are the contract."""
    target, black = summary_of(scores, 'camera'), summary_of(scores, 'black')
    blind = summary_of(scores, 'none')
    velocity = bootstrap_mean(np.array([s.constant_velocity_m for s in scores])).to_dict()
    ours = target['min_ade']['value']
    report: dict[str, Any] = {
        'clips': len(scores), 'min_ade_m': ours, 'min_ade6_m': target['min_ade6']['value'],
        'decision_accuracy': target['decision']['value'],
        'pair_accuracy': target['pair']['value'],
        'attribute_accuracy': target['attributes']['value'],
        'agreement': target['agreement']['value'],
        'black_decision_accuracy': black['decision']['value'],
        'black_pair_accuracy': black['pair']['value'],
        'constant_velocity_min_ade_m': velocity['value'],
        'black_min_ade_m': black['min_ade']['value'],
        'history_only_min_ade_m': blind['min_ade']['value'],
        'below_constant_velocity': round(1 - ours / max(velocity['value'], 1e-9), 5),
        'below_black': round(1 - ours / max(black['min_ade']['value'], 1e-9), 5),
        'intervals': {'target': target, 'black': black, 'history_only': blind,
                      'constant_velocity': {'min_ade': velocity},
                      'expert_agreement': _rate(s.expert_agreement for s in scores)},
        'halves': grouped_briefs(scores, lambda spec: 'event' if spec.event else 'no event'),
        'families': grouped_briefs(scores, lambda spec: spec.family),
    }
    if any(score.spec.variant for score in scores):
        report['parts'] = grouped_briefs(scores, lambda spec: spec.variant or 'plain')
    return report
