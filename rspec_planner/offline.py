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
Plan a bag offline: no DDS, no clock, no threads; the same bag gives the same records bit by bit.

Messages go into the node's own observation buffer in log-time order and the anchor camera
triggers as it does live; waiting for late inputs happens in bag time. Records hold no
durations, because those differ from run to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
import json
import os
from pathlib import Path
from typing import Any, Protocol

from rspec_planner.bag_topics import choose_topics, TopicMap, TopicNames
from rspec_planner.cycle import RateLimit
from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.loading import load_planner
from rspec_planner.model.config import ProfileConfig
from rspec_planner.offline_bag import PlanBag
from rspec_planner.parameters import (
    load_yaml_parameters,
    NodeParameters,
    PARAMETER_FILE,
    raise_problems,
    value_problems,
)
from rspec_planner.planner.buffers import ObservationBuffer, SelectionLimits, Skip
from rspec_planner.planner.calibration import CalibrationChecks
from rspec_planner.planner.images import decode_message
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.plan import Plan
from rspec_planner.planner.plausibility import implausible
from rspec_planner.planner.timing import LatencyWindow
from rspec_planner.planner.tokenizer import TextTokenizer
from rspec_planner.transport import config_path
from rspec_planner.world.bag import BagMessage, BagReader

#: called with the number of messages; gives the function to call after each of them
Progress = Callable[[int], AbstractContextManager[Callable[[], object]]]


class PlannerLike(Protocol):
    """What planning a bag needs of `planner.pipeline.Planner`."""

    @property
    def profile(self) -> ProfileConfig:
        """Return the profile, for cameras and history."""

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """Return what counts the tokens of a navigation text, None for a planner without any."""

    def plan(self, observation: Observation) -> Plan:
        """Return the plan of an observation."""


#: what `record_of` makes every line of records start with
_RECORD_STARTS = b'{"t0_ns": '


@dataclass(frozen=True)
class OfflineOptions:
    """Where things are and what overrides the parameter file ('' and None: nothing)."""

    out: Path | None = None
    records: Path | None = None
    topics: Path | None = None
    params: Path | None = None
    checkpoint: str = ''
    device: str = ''
    seed: int | None = None
    draft: str = ''  # 'none' decodes autoregressively
    overwrite: bool = False


@dataclass
class _Tally:
    """What happened so far."""

    plans: int = 0
    committed: int = 0
    iterations: int = 0
    reused: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    last_skip: Skip | None = None
    times: LatencyWindow = field(default_factory=lambda: LatencyWindow(size=1_000_000))

    def add(self, result: Plan | Skip) -> None:
        """Count one trigger."""
        if isinstance(result, Skip):
            self.skipped[result.reason] += 1
            self.last_skip = result
            return
        stats = result.reasoning.stats
        self.plans += 1
        self.committed += sum(stats.committed)
        self.iterations += stats.iterations
        self.reused += stats.reused
        self.times.add(result.times.total_ms)


class BagPlanner:
    """Feeds messages to a planner in bag time; yields a Plan or a Skip for each trigger."""

    def __init__(self, planner: PlannerLike, topics: TopicMap,
                 parameters: NodeParameters) -> None:
        sync = parameters.sync
        cameras = planner.profile.cameras
        self._planner = planner
        self._topics = topics
        self._cameras = cameras.names
        self._image_size = cameras.decode_size
        self._anchor = cameras.names[cameras.ids.index(sync.anchor_camera)] \
            if sync.anchor_camera in cameras.ids else cameras.anchor
        self._buffer = ObservationBuffer(planner.profile, SelectionLimits(
            image_tolerance_ms=sync.image_tolerance_ms,
            odometry_max_gap_ms=sync.odometry_max_gap_ms,
            max_input_age_ms=sync.max_input_age_ms, image_buffer_mib=sync.image_buffer_mib),
            planner.tokenizer)
        self._info_check = parameters.cameras.info_check
        self._content_check = parameters.cameras.content_check == 'refuse'
        self._checks = CalibrationChecks(cameras, parameters.cameras.fov_tolerance_deg)
        self._rate_hz = parameters.planning.rate_hz
        self._limit = RateLimit()
        self._wait_ns = round(max(sync.image_wait_ms, sync.odometry_wait_ms) * 1e6)
        self._waiting: tuple[int, int] | None = None  # t0 and the bag time when waiting ends

    def feed(self, item: BagMessage) -> Iterator[Plan | Skip]:
        """Take one message; yield the result of a trigger that it completes or outlives."""
        if self._waiting is not None and item.log_ns > self._waiting[1]:
            yield from self.finish()
        if item.topic in self._topics.cameras:
            yield from self._feed_image(self._topics.cameras[item.topic], item)
        elif item.topic == self._topics.odometry:
            self._feed_odometry(item.content)
        elif item.topic in self._topics.infos:
            self._feed_info(self._topics.infos[item.topic], item.content)
        else:
            self._buffer.set_navigation_text(item.content.data)
        if self._waiting is not None and self._complete(self._waiting[0]):
            yield from self.finish()

    def finish(self) -> Iterator[Plan | Skip]:
        """Yield the result of the trigger that is still waiting, if there is one."""
        if self._waiting is None:
            return
        t0_ns, self._waiting = self._waiting[0], None
        chosen = self._buffer.select(t0_ns)
        if isinstance(chosen, Skip):
            yield chosen
            return
        doubt = implausible(chosen, self._content_check)
        if doubt is not None:
            yield Skip(*doubt)
            return
        plan = self._planner.plan(chosen)
        verdict = plan.verdict
        yield plan if verdict.accepted else Skip(f'rejected_{verdict.reason}', verdict.detail)

    def _feed_image(self, camera: str, item: BagMessage) -> Iterator[Plan | Skip]:
        stamp_ns = _stamp_ns(item.content)
        self._buffer.add_image(camera, stamp_ns,
                               partial(_decode, item.topic, item.content, self._image_size),
                               size=len(item.content.data))
        if camera == self._anchor and self._limit.allows(stamp_ns, self._rate_hz):
            yield from self.finish()
            self._waiting = stamp_ns, item.log_ns + self._wait_ns

    def _feed_odometry(self, content: Any) -> None:
        pose, turn = content.pose.pose.position, content.pose.pose.orientation
        self._buffer.add_pose(
            _stamp_ns(content), (pose.x, pose.y, pose.z), (turn.x, turn.y, turn.z, turn.w),
            content.twist.twist.linear.x, content.header.frame_id)

    def _feed_info(self, camera: str, content: Any) -> None:
        fault = self._checks.update(camera, content) if self._info_check != 'ignore' else None
        if self._info_check == 'refuse':
            self._buffer.refuse_camera(
                camera, Skip(fault.reason, fault.detail) if fault else None)

    @property
    def messages(self) -> dict[str, int]:
        """Return how many messages were dropped or do not fit, by reason."""
        return {**self._buffer.dropped, **self._checks.counts}

    def _complete(self, t0_ns: int) -> bool:
        """Return whether every stream has reached t0."""
        return all((self._buffer.newest_stamp_ns(name) or 0) >= t0_ns
                   for name in (*self._cameras, 'odometry'))


def _stamp_ns(content: Any) -> int:
    stamp = content.header.stamp
    return int(stamp.sec) * 10**9 + int(stamp.nanosec)


def _decode(topic: str, content: Any, at_least: tuple[int, int] | None) -> Any:
    """Return RGB pixels of an Image or CompressedImage; errors name the topic."""
    try:
        return decode_message(content, at_least)
    except InputError as error:
        raise InputError(f'{topic}: {error}') from None


def record_of(plan: Plan) -> dict[str, Any]:
    """Return the record of a plan: no durations, floats in full."""
    stats = plan.reasoning.stats
    return {'t0_ns': plan.t0_ns, 'text': plan.reasoning.text,
            'tokens': list(plan.reasoning.token_ids), 'complete': plan.reasoning.complete,
            'iterations': stats.iterations, 'committed': list(stats.committed),
            'reused': stats.reused, 'cautious': plan.cautious,
            'poses': plan.poses.tolist(), 'speeds': plan.speeds.tolist()}


def read_parameters(options: OfflineOptions) -> NodeParameters:
    """Return the node's parameters with the overrides of the command line."""
    values = load_yaml_parameters(options.params or config_path(PARAMETER_FILE))
    overrides = {'model.checkpoint': options.checkpoint, 'model.device': options.device,
                 'model.seed': options.seed,
                 'speculation.draft': '' if options.draft == 'none' else options.draft,
                 'speculation.enabled': False if options.draft == 'none'
                 else True if options.draft else None}
    given = {key: value for key, value in overrides.items() if value not in ('', None)}
    raise_problems(value_problems(given, 'the command line'))
    values.update(given)
    return NodeParameters.from_values(values)


def plan_bag(bag: Path, options: OfflineOptions, *, progress: Progress | None = None,
             make_planner: Callable[[NodeParameters], PlannerLike] = load_planner
             ) -> dict[str, Any]:
    """
    Plan every trigger of a bag, write the records and return the report.

    Raises InputError when the bag cannot be used or gives no plan at all; no file is left then.
    """
    records = options.records or Path(f'{bag}.plans.jsonl')
    _refuse_targets(bag, records, options.out)
    parameters = read_parameters(options)
    with BagReader(bag) as reader:
        types, counts = reader.topics, reader.counts
        if not any(counts.values()):
            raise InputError(f'bag {bag} holds no messages; record it again')
        planner = make_planner(parameters)
        cameras = planner.profile.cameras.names
        topics = choose_topics(bag, types, counts, TopicNames.read(options.topics, cameras),
                               cameras)
        bar = (progress or _no_progress)(sum(counts[topic] for topic in topics.all))
        with bar as advance, _RecordFile(records) as write:
            out = PlanBag(options.out, parameters.output.frame, options.overwrite) \
                if options.out is not None else nullcontext()
            with out as plans:
                tally, feeder = _Tally(), BagPlanner(planner, topics, parameters)
                for result in _results(reader, feeder, topics, advance):
                    tally.add(result)
                    if not isinstance(result, Skip):
                        write(record_of(result))
                        if plans is not None:
                            plans.write(result)
                _require_plans(bag, tally)
    return {**_report(tally, records, options.out), 'messages': feeder.messages}


def _refuse_targets(bag: Path, records: Path, out: Path | None) -> None:
    """Raise ConfigurationError where results would replace something that is no result."""
    if records.is_dir():
        raise ConfigurationError(f'--records {records} is a folder; name a file in it')
    if records.exists() and not _holds_records(records):
        raise ConfigurationError(f'--records {records} exists and holds no records of plans; '
                                 'choose another name, or remove it')
    if out is not None and out.resolve() in (bag.resolve(), records.resolve()):
        what = 'the input bag' if out.resolve() == bag.resolve() else 'also --records'
        raise ConfigurationError(f'--out {out} is {what}; choose another name')


def _holds_records(path: Path) -> bool:
    """Tell whether a file is one of records, or empty; devices and pipes are not."""
    if not path.is_file():
        return False
    with path.open('rb') as file:
        return file.read(len(_RECORD_STARTS)) in (b'', _RECORD_STARTS)


def _results(reader: BagReader, planner: BagPlanner, topics: TopicMap,
             advance: Callable[[], object]) -> Iterator[Plan | Skip]:
    """Yield the result of every trigger of a bag."""
    for item in reader.read(topics.all):
        yield from planner.feed(item)
        advance()
    yield from planner.finish()


def _no_progress(total: int) -> AbstractContextManager[Callable[[], object]]:
    return nullcontext(lambda: None)


class _RecordFile:
    """A JSONL file that appears under its name only when everything is in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f'.{path.name}.{os.getpid()}')

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._part.open('w', encoding='utf-8')
        return lambda record: print(json.dumps(record), file=self._stream)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._stream.close()  # writes what is left, also of what failed
            if kind is None:
                self._part.replace(self._path)
        except OSError as failed:
            raise self._refusal(failed) from error
        finally:
            self._part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(f'{self._path}: cannot be written ({error.strerror or error}); '
                                  'make room, or name a file elsewhere')


def _require_plans(bag: Path, tally: _Tally) -> None:
    """Raise InputError that names the latest obstacle when nothing could be planned."""
    if tally.plans:
        return
    if tally.last_skip is None:
        raise InputError(f'bag {bag} has no frame of the anchor camera with a valid stamp; '
                         'record it longer')
    skipped = ', '.join(f'{reason} {count}' for reason, count in tally.skipped.most_common())
    raise InputError(f'bag {bag} gives no plan; the last obstacle is {tally.last_skip.reason}: '
                     f'{tally.last_skip.detail} (skipped: {skipped})')


def _report(tally: _Tally, records: Path, out: Path | None) -> dict[str, Any]:
    report = {'plans': tally.plans, 'skipped': dict(tally.skipped),
              'accepted_length': tally.committed / tally.iterations if tally.iterations else 0.0,
              'iterations_per_plan': tally.iterations / tally.plans,
              'reused_tokens_per_plan': tally.reused / tally.plans,
              'frame_ms': tally.times.summary(), 'records': str(records)}
    return {**report, 'bag': str(out)} if out is not None else report
