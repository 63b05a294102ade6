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
`rspec plan BAG...`: many bags offline, one after the other or on many processors through Ray.

A bag that fails is named and does not stop the others. What is done is kept in the folder with
the settings it was made with, so that the same command goes on where it stopped. Every bag is
planned with one thread, here and there, because the number of threads changes how sums round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rspec_planner.errors import ConfigurationError, RspecError
from rspec_planner.loading import load_planner
from rspec_planner.offline import OfflineOptions, plan_bag

Progress = Callable[[int, int], None]
Make = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """One bag and where its results go."""

    bag: Path
    options: OfflineOptions  # records inside the folder
    report: Path  # appears when the bag is done
    settings: dict[str, Any]  # that the report must carry to count as done


def fleet_jobs(bags: Sequence[Path], folder: Path, options: OfflineOptions) -> list[Job]:
    """Return one job for each bag; bags of one name get the digest of their path as well."""
    if options.out is not None or options.records is not None:
        raise ConfigurationError('--out and --records name files of one bag; give --folder for '
                                 'many')
    names = Counter(bag.name for bag in bags)
    jobs = []
    for bag in dict.fromkeys(bags):
        digest = hashlib.sha256(str(bag.resolve()).encode()).hexdigest()[:8]
        name = bag.name if names[bag.name] == 1 else f'{bag.name}.{digest}'
        settings = {key: str(value) for key, value in asdict(options).items()
                    if key not in ('out', 'records', 'overwrite')}
        jobs.append(Job(bag, replace(options, records=folder / f'{name}.plans.jsonl'),
                        folder / f'{name}.report.json', {**settings, 'bag': str(bag.resolve())}))
    return jobs


def _identity(bag: Path) -> list[list[Any]]:
    """Return name, size and time of every file of a bag; a changed bag is planned again."""
    files = sorted(bag.iterdir()) if bag.is_dir() else [bag]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files
            if file.is_file()]


def finished(job: Job) -> dict[str, Any] | None:
    """Return the report of a bag that was done before with the same settings."""
    try:
        found = json.loads(job.report.read_text(encoding='utf-8'))
        same = (found['settings'] == job.settings and found['files'] == _identity(job.bag)
                and job.options.records is not None and job.options.records.is_file())
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never done, or cut off: planned again
    return dict(found['report']) if same else None


def run_job(job: Job, make_planner: Make = load_planner) -> dict[str, Any]:
    """Plan one bag; return {'report': ...} or {'error': one line}."""
    import torch
    torch.set_num_threads(1)
    try:
        files = _identity(job.bag) if job.bag.exists() else []
        report = plan_bag(job.bag, job.options, make_planner=make_planner)
    except RspecError as error:
        return {'error': str(error)}
    except Exception as error:  # a defect in one bag must not stop the others
        return {'error': f'unexpected {type(error).__name__}: {error}'}
    plain: dict[str, Any] = json.loads(json.dumps(report, default=str))
    part = job.report.with_name(f'.{job.report.name}.{os.getpid()}')
    part.write_text(json.dumps({'settings': job.settings, 'files': files, 'report': plain}),
                    encoding='utf-8')
    part.replace(job.report)
    return {'report': plain}


def _serial(jobs: Sequence[Job], make_planner: Make) -> Iterator[tuple[Job, dict[str, Any]]]:
    for job in jobs:
        yield job, run_job(job, make_planner)


def _ray(jobs: Sequence[Job], workers: int, make_planner: Make
         ) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Run jobs as Ray tasks of one processor each; a worker that dies is one failed bag."""
    try:
        import ray
    except ImportError:
        raise ConfigurationError(f'--workers {workers} needs Ray; pip install -r '
                                 'requirements-fleet.txt, or leave --workers out') from None
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False,
                 configure_logging=False)
    try:
        task = ray.remote(num_cpus=1, max_retries=0)(run_job)
        waiting = {task.remote(job, make_planner): job for job in jobs}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            job = waiting.pop(done)
            try:
                yield job, ray.get(done)
            except ray.exceptions.RayError as error:
                line = ' '.join(str(error).split())[:300]
                yield job, {'error': f'the worker ended: {line}'}
    finally:
        if started:
            ray.shutdown()


def plan_fleet(bags: Sequence[Path], options: OfflineOptions, folder: Path, *, workers: int = 0,
               progress: Progress | None = None, make_planner: Make = load_planner
               ) -> dict[str, Any]:
    """
    Plan many bags; `workers` above 0 asks Ray for so many processors.

    The report is in the order of the bags; `ok` is False when one failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = fleet_jobs(bags, folder, options)
    reports: dict[Path, Mapping[str, Any]] = {}
    for job in jobs:
        if (before := finished(job)) is not None:
            reports[job.bag] = {'report': before, 'resumed': True}
    waiting = [job for job in jobs if job.bag not in reports]
    runs = _ray(waiting, workers, make_planner) if workers and waiting else \
        _serial(waiting, make_planner)
    for job, result in runs:
        reports[job.bag] = result
        if progress is not None:
            progress(len(reports), len(jobs))
    return _summary(jobs, reports, folder)


def _summary(jobs: Sequence[Job], reports: Mapping[Path, Mapping[str, Any]], folder: Path
             ) -> dict[str, Any]:
    failed = {str(job.bag): reports[job.bag]['error'] for job in jobs
              if 'error' in reports[job.bag]}
    good = {str(job.bag): reports[job.bag]['report'] for job in jobs
            if 'report' in reports[job.bag]}
    return {'bags': len(jobs), 'planned': len(good),
            'resumed': sum('resumed' in report for report in reports.values()),
            'failed': failed, 'plans': sum(report['plans'] for report in good.values()),
            'folder': str(folder), 'reports': good, 'ok': not failed}
