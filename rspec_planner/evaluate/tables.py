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
"""The measured sections of docs/results.md about drafts, from the reports alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rspec_planner.evaluate.attention import GROUPS
from rspec_planner.evaluate.published import (
    ATTENTION,
    LENGTHS,
    ROUTINE_SHARE,
    SPEEDUPS,
)
from rspec_planner.evaluate.results import percent, table
from rspec_planner.evaluate.tree_runs import BRANCH, CHAIN, MARGINAL, REACH
from rspec_planner.planner.drafts import DEFAULT_DRAFT

Report = Mapping[str, Any]
#: goals off-shelf: L of a draft of block 16; S and wall clock of the default draft, stateless
GOAL_LENGTH, GOAL_SPEEDUP, GOAL_CLOCK = 7.0, 4.36, 3.0
GOAL_BLOCK = 16


def interval(found: Report, digits: int = 2) -> str:
    """Return 'mean (low–high)'."""
    low, high = found['ci95']
    return f'{found["mean"]:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})'


def change(found: Report, digits: int = 2) -> str:
    """Return a signed difference with its interval."""
    low, high = found['ci95']
    return f'{found["mean"]:+.{digits}f} ({low:+.{digits}f} … {high:+.{digits}f})'


def share(found: Report) -> str:
    """Return a share with its interval in percent."""
    low, high = (100 * v for v in found['ci95'])
    return f'{100 * found["mean"]:.1f} ({low:.1f}–{high:.1f})'


def sign(found: Report) -> str:
    """Return what an interval says about a difference."""
    low, high = found['ci95']
    return 'positive' if low > 0 else 'negative' if high < 0 else 'not distinguishable from zero'


def length_section(result: Report) -> str:
    """Return accepted length and speed per split, goals and paired comparisons."""
    length = result['length']
    parts = [
        '## Accepted length and speed of the drafts\n',
        f'`rspec eval all`, checkpoint `{result["checkpoint"]}`, {result["precision"]}, '
        f'{result["hardware"]}, {result["threads"]} threads, PyTorch {result["torch"]}. Greedy, '
        'stateless: every clip is prefilled once, and every row of a table decodes from that '
        'state in the same run. L is the number of tokens committed per target forward: strict, '
        'cut at the stop token, bonus token included, pooled; brackets are 95 % intervals over '
        'clips. Author-style L also counts the bonus token behind a stop that was itself '
        'proposed. A floor is a draft without eyes that knows the ego state and the most '
        f'frequent continuations of {length["floor_clips"]} training texts; a draft is compared '
        'with the floor of its own block. S = L / (1 + c), c the cost of a draft in greedy '
        'steps; for EAGLE-3, whose chain the formula does not fit, L T / (T_draft + T_verify). '
        'That is also the measured S of every row: it pays the real cost of the wide verify, '
        'which S takes for one greedy step. `NAME+treeN`: the same draft, its N most probable '
        'prefixes by its marginals verified as one tree (DDTree, arXiv 2604.12989), grown on the '
        'host. `NAME+branchN`: a tree of N nodes of which each was drafted behind its own '
        'ancestors (EAGLE-2, arXiv 2406.16858). `NAME+chainN`: the same draft, a longer chain.\n',
        _clock_text(length),
        '![Accepted length](figures/accepted_length.png)\n',
        _shapes(result)]
    for split, report in length['splits'].items():
        parts += [f'### {split} ({report["clips"]} clips, {report["tokens"]:.1f} tokens)\n',
                  _length_table(split, report), '', *budget_table(report), *_comparisons(report)]
    parts += [*_goals(result), '\n![Acceptance by offset](figures/acceptance_by_offset.png)\n',
              '![Wall clock](figures/wall_clock.png)']
    return '\n'.join(parts)


def _clock_text(length: Report) -> str:
    """Return what the clock covers, and what the taps of a draft cost in the prefill."""
    prefill = length['prefill']
    extras = ', '.join(f'`{name}` {change(row["extra_ms"])} ms'
                       for name, row in prefill['drafts'].items())
    return ('Wall clock is the reasoning step, closing forward included: the median over clips of '
            'the paired ratio. The step starts after the prefill, where a draft costs as well: '
            'rows of the last layer that plain decoding does not need, and the taps. The deployed '
            f'prefill of {prefill["clips"]} clips takes {prefill["plain_ms"]:.2f} ms without a '
            f'draft; extra with one, median of paired differences: {extras}. One column adds '
            'this extra to the time of every clip.\n')


def _shapes(result: Report) -> str:
    rows = [[f'`{name}`', shape['name'], shape['shape'], f'{shape["parameters"] / 1e6:.2f} M']
            for name, shape in result['draft_shapes'].items()]
    return table(['draft', 'trained as', 'shape', 'parameters'], rows) + '\n'


def _length_table(split: str, report: Report) -> str:
    rows = []
    for name, row in report['drafts'].items():
        clock = row['wall_clock']
        rows.append([
            f'floor, B {row["block"]}' if 'above_floor' not in row else f'`{name}`',
            interval(row['accepted_length']),
            f'{row["accepted_length_author_style"]["mean"]:.2f}',
            change(row['above_floor']) if row.get('above_floor') else '–',
            f'{row["iterations"]:.2f}', f'{100 * row["routine_share"]:.0f} %', f'{row["c"]:.2f}',
            f'{row["theoretical_speedup"]:.2f}', f'{row["speedup_measured_verify"]:.2f}',
            interval(clock['same_kernel']), interval(clock['same_kernel_with_prefill']),
            interval(clock['eager']),
            f'{clock["reasoning_ms"]["p50"]:.1f} / {clock["reasoning_ms"]["p95"]:.1f}'])
    for name, known in LENGTHS.items():
        speed = f'{SPEEDUPS[name]:.2f}' if split == 'off-shelf' else '–'
        rows.append([name, f'{known[split]:.2f}' if split in known else '–', '–', '–', '–',
                     f'{100 * ROUTINE_SHARE:.0f} %', '–', speed, *['–'] * 5])
    for name, label in (('ar', 'AR, width 1 (packed)'), ('ar-eager', 'AR, width 1 (eager)')):
        times = report['greedy'][name]['reasoning_ms']
        rows.append([label, '1.00', '–', '–', f'{report["tokens"] - 1:.2f}', *['–'] * 7,
                     f'{times["p50"]:.1f} / {times["p95"]:.1f}'])
    return table(['', 'L', 'author-style', 'above the floor', 'iterations', 'routine share', 'c',
                  'S', 'S, measured verify', 'wall clock to AR, width 1 (packed)',
                  'the same with the extra prefill', 'to AR, width 1 (eager)', 'ms p50 / p95'],
                 rows)


def budget_table(report: Report) -> Iterator[str]:
    """Yield EAGLE-3 as chain, tree of marginals and tree of branches at equal budgets."""
    drafts, shown = report['drafts'], []
    for name, row in drafts.items():
        if row.get('form') != BRANCH:
            continue
        base, width = row['base'], row['block']
        chain = base if drafts[base]['block'] == width else f'{base}+{CHAIN}{width}'
        marginal = f'{base}+{MARGINAL}{row["nodes"]}'
        shown.append([
            f'`{base}`', str(row['nodes']),
            *(f'{interval(drafts[form]["accepted_length"])}; '
              f'{drafts[form]["wall_clock"]["reasoning_ms"]["p50"]:.1f} ms'
              for form in (chain, marginal, name)),
            *(change(report['comparisons'][f'{name} - {form}'], 3) for form in (chain, marginal))])
    if shown:
        yield ('EAGLE-3 at equal budgets: L and the median reasoning step. A chain is as long as '
               f'the deepest path of the trees, {REACH} nodes at most.\n')
        yield table(['draft', 'nodes', 'chain', 'tree of marginals', 'tree of branches',
                     'branches - chain', 'branches - marginals'], shown) + '\n'


def _comparisons(report: Report) -> Iterator[str]:
    for pair, found in report['comparisons'].items():
        yield f'- L, `{pair}`: {change(found, 3)}, {sign(found)}.'
    if report['comparisons']:
        yield ''


def _goals(result: Report) -> Iterator[str]:
    """Yield the goals, met or not: L of block 16, speed of the default draft."""
    report = result['length']['splits'].get('off-shelf')
    if report is None:
        return
    drafts = {name: row for name, row in report['drafts'].items()
              if name in result['draft_shapes']}  # chains alone: neither floors nor trees
    if not drafts:
        return

    def line(what: str, name: str, value: float, goal: float, more: str = '') -> str:
        verdict = 'met' if value >= goal else 'not met'
        return f'- {what}: {value:.2f} (`{name}`), goal {goal:g}: **{verdict}**{more}.'

    yield '### Goals, off-shelf\n'
    lengths = {name: float(row['accepted_length']['mean']) for name, row in drafts.items()
               if row['block'] == GOAL_BLOCK}
    best = max(lengths, key=lambda name: lengths[name], default='')
    what = f'accepted length at block {GOAL_BLOCK}'
    yield line(what, best, lengths[best], GOAL_LENGTH) if best else \
        f'- {what}: no draft of this block was measured.'
    name = DEFAULT_DRAFT if DEFAULT_DRAFT in drafts else next(iter(drafts))
    row = drafts[name]
    yield line('theoretical speed-up', name, row['theoretical_speedup'], GOAL_SPEEDUP,
               f'; with the measured verify {row["speedup_measured_verify"]:.2f}')
    extra = row['wall_clock']['same_kernel_with_prefill']['mean']
    yield line('wall clock of the reasoning step to AR, width 1 (packed)', name,
               row['wall_clock_ratio_same_kernel'], GOAL_CLOCK,
               f'; with the extra prefill {extra:.2f}')
    above = [name for name, row in drafts.items()
             if row.get('above_floor') and row['above_floor']['ci95'][0] > 0]
    names = f' ({", ".join(f"`{n}`" for n in above)})' if above else ''
    yield (f'- above the floor of their block with the whole interval: {len(above)} of '
           f'{len(drafts)} drafts{names}.')


def sampling_section(sampled: Report) -> str:
    """Return L with sampling by both exact rules, beside greedy."""
    rows, plain = [], []
    for split, report in sampled['splits'].items():
        plain.append(f'{split} {report["texts_unlike_greedy"]} of {report["clips"]}')
        for name, row in report['drafts'].items():
            match, rejection = row['match'], row['rejection']
            rows.append([split, f'`{name}`', interval(row['greedy']['accepted_length']),
                         interval(match['accepted_length']), change(match['change']),
                         interval(rejection['accepted_length']), change(rejection['change']),
                         change(rejection['above_match']), str(match['text_mismatches'])])
    return '\n'.join([
        '## Accepted length with sampling\n',
        f'`rspec eval length --temperature {sampled["temperature"]:g}`, top-p '
        f'{sampled["top_p"]:g}, seed {sampled["seed"]}, the same clips and stateless as above. '
        'Deterministic draft: one token is drawn from every row of the verify, and proposals '
        'are kept while they equal it. Rejection (arXiv 2211.17192): proposals are drawn from '
        'the draft at the same temperature and top-p, and tested against the target. Both leave '
        "the target's distribution as it is. By the first rule the text is that of plain "
        'sampling with the same numbers; the last column counts the texts that are not, because '
        'a verify of another width rounds differently. An EAGLE-3 chain draws every proposal '
        'from a distribution behind its own best tokens, not behind those drawn, which costs '
        'the rejection rule some length. Texts of plain sampling that are not the greedy ones: '
        f'{", ".join(plain)}.\n',
        table(['split', 'draft', 'L, greedy', 'L, deterministic draft', 'to greedy',
               'L, rejection', 'to greedy', 'rejection - deterministic',
               'texts unlike plain sampling'], rows)])


def exactness_section(result: Report) -> str:
    """Return what exactness found."""
    exact = result['exactness']
    rows = [[f'`{name}`', str(row['token_mismatches']), str(row['token_mismatches_width_1']),
             str(row['trajectory_mismatches']), f'{row["bit_equal_trajectories"]}',
             f'{row["largest_deviation_mm"]:.2g}', f'{row["largest_deviation_width_1_mm"]:.2g}']
            for name, row in exact['drafts'].items()]
    pair = exact['deployed']
    parts = [
        '## Exactness\n',
        f'`rspec eval exactness`, {exact["clips"]} clips, greedy. AR through the same wide '
        "verify: greedy decoding through a verify of the draft's own width whose proposals are "
        'never accepted. AR, width 1: greedy decoding as without a draft. Trajectories use the '
        f'same noise; two that are more than {exact["tolerance_mm"]:g} mm apart anywhere within '
        '6.4 s count as different.\n',
        table(['', 'token mismatches, AR through the same wide verify',
               'token mismatches, AR, width 1', 'trajectory mismatches',
               'bit-equal trajectories', 'largest deviation, mm', 'to AR, width 1, mm'], rows),
        f'\nDeployed: the planner with draft `{pair["draft"]}` and reuse beside the planner '
        f'without either, {pair["drives"]} drives, {pair["frames"]} frames: '
        f'{pair["token_mismatches"]} texts differ, {pair["trajectory_mismatches"]} published '
        f'paths are beyond the tolerance, largest deviation '
        f'{pair["largest_deviation_mm"]:.2g} mm.']
    if exact['divergences']:
        lines = [[f'`{found["clip"]}`', f'`{found["run"]}`', str(found['index']),
                  f'{found["top2_gap"]:.2g}'] for found in exact['divergences']]
        count = exact['divergences_found']
        cut = f' (first {len(lines)} of {count})' if count > len(lines) else ''
        parts += [f'\nTexts that leave that of AR, width 1, and how close the two best logits '
                  f'were{cut}:\n', table(['clip', 'run', 'token', 'gap'], lines)]
    return '\n'.join(parts)


def attention_section(result: Report) -> str:
    """Return the budget in the paper's form, every layer, controls, and the verdict."""
    attention = result['attention']
    rows = [[f'{name} (paper, one clip)', '0', f'{100 * paper["visual"]:.1f}', '–', '–',
             f'{100 * paper["text_and_history"]:.1f}', f'{100 * paper["generated"]:.1f}',
             f'{paper["entropy"]:.3f}', '–'] for name, paper in ATTENTION.items()]
    for name, row in attention['drafts'].items():
        for layer, found in enumerate(row['layers']):
            rows.append([f'`{name}`', str(layer), *_budget(found)])
        for layer, found in enumerate(row['other_rotary_layers'][:1]):
            rows.append([f'`{name}`, other rotary at test time', str(layer), *_budget(found)])
    parts = [
        '## Where the drafts look\n',
        f'`rspec eval attention`, {attention["clips"]} clips. One block anchored at the first '
        'generated token, averaged over heads and rows; percent of the attention, 95 % '
        'intervals over clips. Entropy: within text and history, normalised.\n',
        '![Attention budget](figures/attention_budget.png)\n',
        table(['draft', 'layer', 'visual', 'ego history', 'other text', 'text and history',
               'generated', 'entropy', 'history entropy'], rows), '',
        *_shift(attention), *_controls(attention)]
    return '\n'.join(parts)


def _budget(found: Report) -> list[str]:
    cells = [share(found[group]) for group in GROUPS[:3]]
    cells += [share(found['text_and_history']), share(found['generated'])]
    return cells + [interval(found[name], 3) if name in found else '–'
                    for name in ('entropy', 'history_entropy')]


def _shift(attention: Report) -> Iterator[str]:
    """Yield whether flat and mirror differ here as in the paper."""
    paper = {group: 100 * (ATTENTION['FlatRoPE'][group] - ATTENTION['3D mirror'][group])
             for group in ('visual', 'text_and_history', 'generated')}
    for pair, found in attention['shift'].items():
        same = [group for group, gain in paper.items()
                if sign(found[group]) == ('positive' if gain > 0 else 'negative')]
        verdict = ('the same shift' if len(same) == 3 else
                   "not the paper's shift" if not same else
                   f'part of the shift ({", ".join(same).replace("_", " ")})')
        cells = ', '.join(
            f'{group.replace("_", " ")} {100 * found[group]["mean"]:+.1f} points '
            f'({100 * found[group]["ci95"][0]:+.1f} … {100 * found[group]["ci95"][1]:+.1f}; '
            f'paper {gain:+.1f})' for group, gain in paper.items())
        yield f'First layer, `{pair}`: {cells}. Our world shows **{verdict}**.\n'


def _controls(attention: Report) -> Iterator[str]:
    """Yield the accepted length under each control."""
    rows = []
    for name, row in attention['drafts'].items():
        for label, found in row['controls'].items():
            cell = '–' if label == 'as trained' else change(found['change'])
            rows.append([f'`{name}`', label, interval(found['accepted_length']), cell])
    yield ('Controls at test time, without training: what a share of the attention is worth. L '
           "is exact, from all anchors of the target's own text.\n")
    yield table(['draft', 'control', 'L', 'change'], rows)


def routing_section(result: Report) -> str:
    """Return who supplies which tokens, ranks at rejections and the disturbance test."""
    routing = result['routing']
    rows = [[f'`{name}`', kind, str(found['tokens']), percent(found['accepted_share'])]
            for name, row in routing['drafts'].items() for kind, found in row['kinds'].items()]
    ranks = [[f'`{name}`', str(row['rejections']), f'{row["median_rank"]:.0f}',
              *(percent(row['within_rank'][rank]) for rank in ('2', '3', '5', '10')),
              str(row['not_in_head'])] for name, row in routing['drafts'].items()]
    swap = routing['disturbance']
    return '\n'.join([
        '## Which tokens the draft supplies\n',
        '`rspec eval routing`. Kinds come from the catalogue of sentences: history (decided by '
        'the ego motion), phrase, deliberative (only the images decide), closing. '
        f'{percent(routing["deliberative_share"])} of all generated tokens are deliberative.\n',
        '![Routing](figures/routing.png)\n',
        table(['draft', 'kind', 'tokens', 'supplied by the draft'], rows),
        "\nWhere a proposal was rejected, the rank of the target's token among the draft's "
        'choices:\n',
        table(['draft', 'rejections', 'median rank', 'rank ≤ 2', '≤ 3', '≤ 5', '≤ 10',
               'not in the head'], ranks),
        f'\nDisturbance: {swap["clips"]} clips were given the ego history of another clip, '
        f'images unchanged. The opener follows the new history in '
        f'{percent(swap["opener_follows"])}, the action changes in '
        f'{percent(swap["action_changes"])}, the cause in {percent(swap["cause_changes"])}.'])


def reuse_section(result: Report) -> str:
    """Return temporal reuse beside stateless decoding."""
    reuse = result['reuse']
    rows = []
    for name, way in reuse['ways'].items():
        full = percent(way['full_match']) if 'full_match' in way else '–'
        tokens = interval(way['reused_tokens'], 1) if 'reused_tokens' in way else '–'
        times, total = way['reasoning_ms'], way['prefill_and_reasoning_ms']
        label = name if name in ('greedy', 'stateless') else f'reuse after {name}'
        rows.append([label, full, tokens, interval(way['iterations']),
                     f'{times["p50"]:.1f} / {times["p95"]:.1f}',
                     f'{total["p50"]:.1f} / {total["p95"]:.1f}'])
    return '\n'.join([
        '## Temporal reuse on drives\n',
        f'`rspec eval reuse`, draft `{reuse["draft"]}`, {reuse["drives"]} drives of the embedded '
        f'world at {reuse["rate_hz"]} Hz, {reuse["frames"]} frames. The text of an earlier frame '
        'rides in the prefill and is verified there; a full match leaves nothing to decode. '
        f'Texts that differ from greedy decoding: {reuse["token_mismatches"]}. Consecutive '
        'frames say mostly the same, so these numbers do not mix with the stateless L. The ways '
        'take turns in coming first; every way runs the stages that the planner deploys.\n',
        table(['', 'full match', 'tokens reused', 'iterations per plan',
               'reasoning ms p50 / p95', 'with prefill p50 / p95'], rows)])
