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
Write and read the chain of causation (CoC).

A sentence is `{opener}, {ACTION} because {CAUSE} {WHERE}.`

The opener is a function of the 16 history poses alone. Everything after it is written from the
same Decision object that the expert follows. Wording varies only with something visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import itertools
import re

import numpy as np

from rspec_planner.errors import InputError
from rspec_planner.world.clip import Decision, DELIBERATIVE, ROUTINE_HISTORY, ROUTINE_PHRASE, STOP

MOTIONS = ('stopped', 'creeping', 'slowing', 'cruising', 'accelerating')
DIRECTIONS = ('straight', 'left', 'right')

#: values of every slot
SLOTS: dict[str, tuple[str, ...]] = {
    'c': ('red', 'blue', 'white', 'black', 'green', 'yellow'),
    'v': ('car', 'van', 'truck'),
    'w': ('car', 'van', 'truck'),
    's': ('left', 'right'),
    'o': ('left', 'right'),
    'd': ('close', 'midway', 'far'),
    'p': ('child', 'pedestrian', 'dog'),
    'l': ('red', 'amber'),
}
#: name of each slot in Decision.attributes
SLOT_NAMES = {'c': 'colour', 'v': 'vehicle', 'w': 'other_vehicle', 's': 'side', 'o': 'other_side',
              'd': 'distance', 'p': 'person', 'l': 'lamp'}

#: (action, cause) -> sentence after the opener; capitals and slots are deliberative words.
#: An action or cause may itself contain a slot, for example 'nudge_{o}'.
TEMPLATES: dict[tuple[str, str], str] = {
    ('brake', 'lead_braking'):
        'BRAKE behind the {c} {v} because it is BRAKING {d} ahead in our lane',
    ('follow', 'lead_driving'):
        'FOLLOW the {c} {v} because it is DRIVING {d} ahead in our lane',
    ('start', 'lead_leaving'):
        'START behind the {c} {v} because it is now PULLING away from us',
    ('wait', 'lead_standing'):
        'WAIT behind the {c} {v} because it is still STANDING in our lane',
    ('stop', 'light_{l}'):
        'STOP before the line because the traffic light {d} ahead is {l}',
    ('continue', 'light_green'):
        'CONTINUE through the junction because the traffic light {d} ahead is GREEN',
    ('start', 'light_turned_green'):
        'START across the junction because the traffic light has turned GREEN',
    ('wait', 'light_still_red'):
        'WAIT at the line because the traffic light ahead is still RED',
    ('stop', 'stop_sign'):
        'STOP before the line because a STOP sign controls the junction {d} ahead',
    ('keep_speed', 'no_sign'):
        'KEEP speed because NO sign controls the junction {d} ahead of us',
    ('yield', 'person_stepping'):
        'YIELD before the crosswalk because a {p} is STEPPING out from the {s}',
    ('pass', 'person_waiting'):
        'PASS the crosswalk because a {p} is only WAITING on the {s}',
    ('brake_hard', 'person_running'):
        'BRAKE hard because a {p} is RUNNING out behind the parked {c} {v}',
    ('keep_speed', 'parked_alone'):
        'KEEP speed because NOBODY is near the {c} {v} parked on the {s}',
    ('slow', 'cutting_in'):
        'SLOW down because the {c} {v} on the {s} is CUTTING into our lane',
    ('keep_speed', 'keeping_lane'):
        'KEEP speed because the {c} {v} on the {s} is KEEPING its lane',
    ('nudge_left', 'cyclist_in_lane'):
        'NUDGE to the left because a cyclist is RIDING in our lane {d} ahead',
    ('keep_lane', 'cyclist_on_path'):
        'KEEP the lane because the cyclist {d} ahead is riding on the PATH',
    ('nudge_{o}', 'parked_blocks'):
        'NUDGE to the {o} because a parked {c} {v} BLOCKS our lane on the {s}',
    ('keep_lane', 'parked_leaves_room'):
        'KEEP the lane because the parked {c} {v} on the {s} LEAVES room',
    ('nudge_{o}', 'cones_close'):
        'NUDGE to the {o} because cones CLOSE the {s} part of our lane',
    ('keep_lane', 'cones_shoulder'):
        'KEEP the lane because the cones ahead stand on the {s} SHOULDER',
    ('change_left', 'lane_blocked'):
        'CHANGE to the left lane because a stopped {c} {v} blocks our lane',
    ('stop', 'left_occupied'):
        'STOP behind the {c} {v} because another {w} is PASSING on the left',
    ('wait', 'oncoming_close'):
        'WAIT before turning left because an ONCOMING {c} {v} is close to our path',
    ('turn_left', 'oncoming_free'):
        'TURN left through the junction because the oncoming lane is FREE',
    ('wait', 'person_crossing'):
        'WAIT before turning right because a {p} is CROSSING the side road',
    ('turn_right', 'crosswalk_free'):
        'TURN right through the junction because the crosswalk of the side road is FREE',
    ('slow_{s}', 'road_bends'):
        'SLOW down and steer {s} because the road BENDS sharply to the {s}',
    ('keep_straight', 'road_straight'):
        'KEEP speed and steer straight because the road ahead runs STRAIGHT',
    ('slow', 'bus_pulling_out'):
        'SLOW down and let it merge because the {c} bus ahead is PULLING out',
    ('pass', 'bus_waiting'):
        'PASS with some room because the {c} bus at the stop is WAITING',
}

#: families that are never trained: text of the reference, judged by ACCEPTED_ACTIONS
OFF_SHELF_TEMPLATES: dict[tuple[str, str], str] = {
    ('pull_over', 'emergency_flashing'):
        'PULL over to the right because an EMERGENCY vehicle with flashing lamps is coming',
    ('keep_speed', 'emergency_off'):
        'KEEP speed because the EMERGENCY vehicle in the oncoming lane has no flashing lamps',
    ('stop', 'barrier_closed'):
        'STOP before the line because the barrier of the level crossing is CLOSED',
    ('continue', 'barrier_open'):
        'CONTINUE over the level crossing because the barrier ahead of us is OPEN',
    ('brake', 'animal_on_road'):
        'BRAKE and wait because an ANIMAL is standing in our lane ahead',
    ('keep_speed', 'animal_beside'):
        'KEEP speed because the ANIMAL ahead is standing beside the road',
    ('wait', 'narrow_oncoming'):
        'WAIT before the narrow part because an ONCOMING {c} {v} is coming through',
    ('nudge_left', 'narrow_free'):
        'NUDGE to the left because the narrow part ahead of us is FREE',
    ('yield', 'roundabout_busy'):
        'YIELD before the roundabout because a {c} {v} is CIRCLING from the left',
    ('continue', 'roundabout_free'):
        'CONTINUE through the roundabout because the way from the left is FREE',
}

_STOPPING = frozenset(('stop', 'wait', 'yield', 'brake', 'brake_hard', 'slow'))
_MOVING = frozenset(('keep_speed', 'keep_lane', 'continue', 'pass', 'follow', 'keep_straight'))
#: for families that are never trained: actions that answer the same situation
ACCEPTED_ACTIONS: dict[str, frozenset[str]] = {
    'emergency_flashing': _STOPPING | {'pull_over', 'nudge_right'},
    'emergency_off': _MOVING,
    'barrier_closed': _STOPPING,
    'barrier_open': _MOVING,
    'animal_on_road': _STOPPING | {'nudge_left', 'nudge_right', 'change_left'},
    'animal_beside': _MOVING,
    'narrow_oncoming': _STOPPING,
    'narrow_free': _MOVING | {'nudge_left'},
    'roundabout_busy': _STOPPING,
    'roundabout_free': _MOVING | {'slow_right', 'slow_left'},
}

NAVIGATION_TEXTS = ('turn left at the junction', 'turn right at the junction')

#: thresholds of the opener, and the margins that a generated clip keeps on either side
STOPPED_BELOW = 0.3  # m/s
CREEPING_BELOW = 2.8  # m/s
ACCELERATION_ABOVE = 0.45  # m/s^2
LATERAL_ABOVE = 0.13  # metres, of the oldest pose beside the heading at t0
_SPEED_MARGIN, _ACCELERATION_MARGIN, _LATERAL_MARGIN = 0.2, 0.2, 0.07

_WORD = re.compile(r'[a-z]+|[,.]')


@dataclass(frozen=True)
class Sentence:
    """A sentence taken apart."""

    opener: str
    action: str
    cause: str
    attributes: dict[str, str]


def tokens(text: str) -> list[str]:
    """Split lower-cased text into words and punctuation, each its own token."""
    return _WORD.findall(text.lower())


def _motion_values(history: np.ndarray) -> tuple[float, float, float]:
    """Return (speed of the last 0.5 s, acceleration, lateral place of the oldest pose)."""
    xy = np.asarray(history, np.float64)[:, :2]
    early = float(np.hypot(*(xy[5] - xy[0]))) / 0.5
    late = float(np.hypot(*(xy[15] - xy[10]))) / 0.5
    return late, late - early, float(xy[0, 1] - xy[15, 1])


def opener(history: np.ndarray) -> str:
    """
    Return the two opener words for a (16, >=2) history in the ego frame at t0, oldest first.

    The two half-second windows lie 1 s apart, so their speed difference is the acceleration.
    """
    speed, acceleration, lateral = _motion_values(history)
    if speed < STOPPED_BELOW:
        motion = 'stopped'
    elif speed < CREEPING_BELOW:
        motion = 'creeping'
    elif acceleration < -ACCELERATION_ABOVE:
        motion = 'slowing'
    elif acceleration > ACCELERATION_ABOVE:
        motion = 'accelerating'
    else:
        motion = 'cruising'
    side = 'left' if lateral > LATERAL_ABOVE else 'right' if lateral < -LATERAL_ABOVE else ''
    return f'{motion} {side or "straight"}'


def opener_is_clear(history: np.ndarray) -> bool:
    """Tell whether the history keeps its distance from every threshold of the opener."""
    speed, acceleration, lateral = _motion_values(history)
    if min(abs(speed - STOPPED_BELOW), abs(speed - CREEPING_BELOW)) < _SPEED_MARGIN:
        return False
    if speed > CREEPING_BELOW and abs(
            abs(acceleration) - ACCELERATION_ABOVE) < _ACCELERATION_MARGIN:
        return False
    return abs(abs(lateral) - LATERAL_ABOVE) >= _LATERAL_MARGIN


def _fill(pattern: str, attributes: dict[str, str]) -> str:
    return pattern.format(**{key: attributes.get(name, '') for key, name in SLOT_NAMES.items()})


def decide(action: str, cause: str, **attributes: str) -> Decision:
    """
    Return the Decision for a template key, its slots filled from `attributes`.

    Raises InputError when the catalogue has no such template or a slot value is unknown.
    """
    key = (action, cause)
    template = TEMPLATES.get(key) or OFF_SHELF_TEMPLATES.get(key)
    if template is None:
        raise InputError(f'decision {key} is not in the catalogue; add a template for it')
    for slot in set(re.findall(r'{(\w)}', template + action + cause)):
        value = attributes.get(SLOT_NAMES[slot], '')
        if value not in SLOTS[slot]:
            raise InputError(f'{SLOT_NAMES[slot]} {value!r} of {key} is unknown; '
                             f'use one of {", ".join(SLOTS[slot])}')
    return Decision(_fill(action, attributes), _fill(cause, attributes), dict(attributes))


def _template(decision: Decision) -> str:
    for table in (TEMPLATES, OFF_SHELF_TEMPLATES):
        for (action, cause), template in table.items():
            if (_fill(action, decision.attributes) == decision.action
                    and _fill(cause, decision.attributes) == decision.cause):
                return template
    raise InputError(f'decision {decision.action}/{decision.cause} is not in the catalogue; '
                     'build it with decide()')


def write(history: np.ndarray, decision: Decision) -> tuple[str, np.ndarray]:
    """
    Return the CoC text and its token kinds (n,) uint8, one STOP at the end.

    `history` is (16, >=2), ego frame at t0.
    """
    head = opener(history)
    words, kinds = [*head.split(), ','], [ROUTINE_HISTORY, ROUTINE_HISTORY, ROUTINE_PHRASE]
    for word in _template(decision).split():
        deliberative = word[0] == '{' or word.isupper()
        words.append(_fill(word, decision.attributes).lower())
        kinds.append(DELIBERATIVE if deliberative else ROUTINE_PHRASE)
    text = ' '.join(words).replace(' ,', ',') + '.'
    return text, np.array([*kinds, ROUTINE_PHRASE, STOP], np.uint8)


def _patterns() -> list[tuple[tuple[str, str], re.Pattern[str]]]:
    result = []
    for key, template in {**TEMPLATES, **OFF_SHELF_TEMPLATES}.items():
        seen: set[str] = set()
        parts = []
        for word in template.split():
            if word[0] != '{':
                parts.append(word.lower())
            elif word[1] in seen:
                parts.append(f'(?P={word[1]})')
            else:
                seen.add(word[1])
                parts.append(f'(?P<{word[1]}>{"|".join(SLOTS[word[1]])})')
        result.append((key, re.compile(' '.join(parts))))
    return result


_PATTERNS = _patterns()


def parse(text: str) -> Sentence | None:
    """Take a sentence apart; None when it is not one that the catalogue can produce."""
    words = tokens(text)
    if len(words) < 5 or words[2] != ',' or words[-1] != '.':
        return None
    body = ' '.join(words[3:-1])
    for (action, cause), pattern in _PATTERNS:
        match = pattern.fullmatch(body)
        if match:
            values = match.groupdict()
            if 'o' in values and values['o'] == values.get('s'):
                return None
            attributes = {SLOT_NAMES[slot]: value for slot, value in values.items()}
            return Sentence(' '.join(words[:2]), _fill(action, attributes),
                            _fill(cause, attributes), attributes)
    return None


def parse_decision(text: str) -> tuple[str, str] | None:
    """Return (action, cause) of a sentence, or None when it is none of ours."""
    sentence = parse(text)
    return None if sentence is None else (sentence.action, sentence.cause)


def acceptable(decision: Decision, text: str) -> bool:
    """
    Tell whether `text` decides as `decision` does.

    Trained families need the same action and cause. For the families that are never trained
    the action must answer the same situation (ACCEPTED_ACTIONS).
    """
    parsed = parse_decision(text)
    if parsed is None:
        return False
    accepted = ACCEPTED_ACTIONS.get(decision.cause)
    if accepted is not None:
        return parsed[0] in accepted
    return parsed == (decision.action, decision.cause)


def attribute_matches(decision: Decision, text: str) -> tuple[int, int]:
    """Return (attributes right, attributes said) of `text` against the decision."""
    sentence = parse(text)
    if sentence is None:
        return 0, len(decision.attributes)
    said = sentence.attributes
    return sum(decision.attributes.get(k) == v for k, v in said.items()), len(said)


def _sentences(table: dict[tuple[str, str], str]) -> Iterator[str]:
    for template in table.values():
        slots = sorted(set(re.findall(r'{(\w)}', template)))
        for values in itertools.product(*(SLOTS[slot] for slot in slots)):
            yield template.format(**dict(zip(slots, values))).lower()


def vocabulary(off_shelf: bool = True) -> list[str]:
    """Return the sorted words (and punctuation) that any template or command can produce."""
    words = {',', '.', *MOTIONS, *DIRECTIONS}
    for table in (TEMPLATES, OFF_SHELF_TEMPLATES) if off_shelf else (TEMPLATES,):
        for sentence in _sentences(table):
            words.update(sentence.split())
    for text in NAVIGATION_TEXTS:
        words.update(text.split())
    return sorted(words)
