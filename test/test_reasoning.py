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
"""The text: openers from history alone, a closed vocabulary, parsing back."""

import itertools
import re

import numpy as np
import pytest

from rspec_planner.errors import InputError
from rspec_planner.world import reasoning as rs
from rspec_planner.world.clip import DELIBERATIVE, ROUTINE_HISTORY, STOP


def history(speed, acceleration=0.0, curvature=0.0):
    """Return a (16, 4) history that ends with these values, ego frame at t0."""
    tau = np.linspace(-1.5, 0.0, 16)
    s = speed * tau + acceleration * tau ** 2 / 2
    return np.stack([s, curvature * s * s / 2, 0 * s, curvature * s], -1).astype(np.float32)


@pytest.mark.parametrize('values, words', [
    ((0.0,), 'stopped straight'), ((1.5,), 'creeping straight'), ((9.0,), 'cruising straight'),
    ((9.0, -1.0), 'slowing straight'), ((9.0, 1.0), 'accelerating straight'),
    ((9.0, 0.0, 0.01), 'cruising left'), ((9.0, 0.0, -0.01), 'cruising right'),
    ((8.0, -1.0, 0.01), 'slowing left')])
def test_opener(values, words):
    assert rs.opener(history(*values)) == words
    assert rs.opener_is_clear(history(*values))


def test_opener_survives_quantisation():
    for values in ((9.0, 0.8, 0.006), (5.0, -0.8, -0.012), (0.9,), (3.4, 0.1)):
        exact = history(*values)
        coarse = np.cumsum(np.round(np.diff(exact, axis=0, prepend=exact[:1]) / 0.008) * 0.008,
                           axis=0) + exact[:1]
        assert rs.opener_is_clear(exact) and rs.opener(coarse) == rs.opener(exact)


def test_margins_are_noticed():
    assert not rs.opener_is_clear(history(9.0, 0.5))
    assert not rs.opener_is_clear(history(2.75))
    assert not rs.opener_is_clear(history(9.0, 0.0, 0.0014))


def decisions(table):
    """Yield a decision for each value of each template."""
    for action, cause in table:
        slots = sorted(set(re.findall(r'{(\w)}', table[action, cause] + action + cause)))
        for values in itertools.product(*(rs.SLOTS[s] for s in slots)):
            chosen = {rs.SLOT_NAMES[s]: v for s, v in zip(slots, values)}
            if chosen.get('side') and chosen.get('side') == chosen.get('other_side'):
                continue
            yield rs.decide(action, cause, **chosen)


@pytest.mark.parametrize('table', [rs.TEMPLATES, rs.OFF_SHELF_TEMPLATES])
def test_every_sentence_reads_back_as_its_decision(table):
    words, texts = set(rs.vocabulary()), set()
    for decision in decisions(table):
        text, kinds = rs.write(history(9.0), decision)
        tokens = rs.tokens(text)
        assert 15 <= len(tokens) <= 20 and len(kinds) == len(tokens) + 1
        assert set(tokens) <= words and text == text.lower()
        assert kinds[-1] == STOP and (kinds[:2] == ROUTINE_HISTORY).all()
        assert (kinds == DELIBERATIVE).sum() >= 2
        sentence = rs.parse(text)
        assert (sentence.action, sentence.cause) == (decision.action, decision.cause)
        assert sentence.attributes == decision.attributes and rs.acceptable(decision, text)
        assert text not in texts
        texts.add(text)


def test_vocabulary_sizes_and_commands():
    assert len(rs.vocabulary(off_shelf=False)) == 119
    assert set(' '.join(rs.NAVIGATION_TEXTS).split()) <= set(rs.vocabulary())
    assert rs.vocabulary() == sorted(rs.vocabulary())


def test_wrong_texts_are_not_accepted():
    decision = rs.decide('stop', 'light_{l}', lamp='red', distance='far')
    good, _ = rs.write(history(9.0), decision)
    assert rs.acceptable(decision, good) and rs.acceptable(decision, good.replace('far', 'close'))
    assert rs.attribute_matches(decision, good) == (2, 2)
    assert rs.attribute_matches(decision, good.replace('far', 'close')) == (1, 2)
    assert not rs.acceptable(decision, good.replace('red', 'amber'))
    assert not rs.acceptable(decision, good.replace('stop', 'go'))
    assert rs.parse_decision('hello world') is None
    nudge = 'cruising straight, nudge to the left because cones close the left part of our lane.'
    assert rs.parse_decision(nudge) is None


def test_untrained_families_accept_what_answers_the_situation():
    deer = rs.decide('brake', 'animal_on_road')
    stop = rs.decide('stop', 'stop_sign', distance='close')
    keep = rs.decide('keep_speed', 'no_sign', distance='close')
    assert rs.acceptable(deer, rs.write(history(5.0), stop)[0])
    assert not rs.acceptable(deer, rs.write(history(5.0), keep)[0])


def test_bad_decisions_are_named():
    with pytest.raises(InputError, match='not in the catalogue'):
        rs.decide('fly', 'away')
    with pytest.raises(InputError, match="colour 'pink'"):
        rs.decide('slow', 'bus_pulling_out', colour='pink')
