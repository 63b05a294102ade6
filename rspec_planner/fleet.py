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
from glob import escape
import hashlib
from importlib import import_module
from itertools import islice
import json
import os
from pathlib import Path
from typing import Any

import rspec_planner
from rspec_planner.errors import ConfigurationError, RspecError
from rspec_planner.loading import load_planner
from rspec_planner.offline import OfflineOptions, plan_bag, read_parameters
from rspec_planner.yaml_file import read_yaml

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
    """
    Return one job for each bag; bags of one name get the digest of their path as well.

    A bag that is given twice, by whichever path, is one job. ConfigurationError for options of
    one bag and for parameters that no bag could be planned with.
    """
    if options.out is not None or options.records is not None:
        raise ConfigurationError('--out and --records name files of one bag; give --folder for '
                                 'many')
    settings = fleet_settings(options)
    paths = {bag.resolve(): bag for bag in reversed(bags)}
    names = Counter(path.name for path in paths)
    jobs = []
    for path, bag in reversed(paths.items()):
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
        name = path.name if names[path.name] == 1 else f'{path.name}.{digest}'
        jobs.append(Job(bag, replace(options, records=folder / f'{name}.plans.jsonl'),
                        folder / f'{name}.report.json', {**settings, 'bag': str(path)}))
    return jobs


def fleet_settings(options: OfflineOptions) -> dict[str, Any]:
    """Return what decides the plans of a bag: parameters, topics, weights, this package."""
    from rspec_planner.planner.staging import config_digest, source_digests
    parameters = read_parameters(options)
    topics = read_yaml(options.topics, 'topic mapping') if options.topics is not None else None
    return {'parameters': json.loads(json.dumps(asdict(parameters), default=str)),
            'topics': topics, 'version': rspec_planner.__version__,
            'config': config_digest(parameters.model.checkpoint),
            'weights': source_digests(
                parameters.model.checkpoint,
                parameters.speculation.draft if parameters.speculation.enabled else 'none')}


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
                and found['records'] == _digest(job.options.records)
                and isinstance(found['report']['plans'], int))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # never done, cut off or tampered with: planned again
    return dict(found['report']) if same else None


def _digest(path: Path | None) -> str:
    """Return the sha256 of a file in hex; OSError when it is not there."""
    if path is None:
        raise FileNotFoundError('no records')
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def run_job(job: Job, make_planner: Make = load_planner) -> dict[str, Any]:
    """Plan one bag; return {'report': ...} or {'error': one line}."""
    import torch
    torch.set_num_threads(1)
    try:
        files = _identity(job.bag) if job.bag.exists() else []
        report = plan_bag(job.bag, job.options, make_planner=make_planner)
        plain: dict[str, Any] = json.loads(json.dumps(report, default=str))
        _write(job, files, plain)
    except RspecError as error:
        return {'error': str(error)}
    except OSError as error:
        return {'error': f'{error.filename or job.bag}: {error.strerror or error}; check the '
                         'path, its permissions and the free space'}
    except Exception as error:  # a defect in one bag must not stop the others
        return {'error': f'unexpected {type(error).__name__}: {error}'}
    return {'report': plain}


def _write(job: Job, files: list[list[Any]], report: Mapping[str, Any]) -> None:
    """Write the report of a bag, which appears under its name only when it is whole."""
    part = job.report.with_name(f'.{job.report.name}.{os.getpid()}')
    try:
        part.write_text(json.dumps({'settings': job.settings, 'files': files, 'report': report,
                                    'records': _digest(job.options.records)}), encoding='utf-8')
        part.replace(job.report)
    finally:
        part.unlink(missing_ok=True)


def _serial(jobs: Sequence[Job], make_planner: Make) -> Iterator[tuple[Job, dict[str, Any]]]:
    for job in jobs:
        yield job, run_job(job, make_planner)


def _ray(jobs: Sequence[Job], workers: int, make_planner: Make
         ) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Run jobs as Ray tasks, `workers` at a time; a worker that dies is one failed bag."""
    try:
        ray: Any = import_module('ray')
    except ImportError:
        raise ConfigurationError(f'--workers {workers} needs Ray; pip install -r '
                                 'requirements-fleet.txt, or leave --workers out') from None
    started, many = not ray.is_initialized(), min(workers, len(jobs))
    if started:
        _connect(ray, many)
    try:
        task = ray.remote(**_needs(ray, jobs[0]), max_retries=0)(run_job)
        left, running = iter(jobs), {}
        for job in islice(left, many):
            running[task.remote(job, make_planner)] = job
        while running:
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            job = running.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayError as error:
                line = ' '.join(str(error).split())[:300]
                result = {'error': f'the worker ended: {line}'}
            for following in islice(left, 1):
                running[task.remote(following, make_planner)] = following
            yield job, result
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, workers: int) -> None:
    """
    Join the cluster that RAY_ADDRESS names, or start Ray here with so many processors.

    ConfigurationError when the cluster does not answer. Nothing is told to Ray's makers.
    """
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    address = os.environ.get('RAY_ADDRESS') or 'local'
    size = {'num_cpus': workers, 'include_dashboard': False} if address == 'local' else {}
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **size)
    except (Exception, SystemExit) as error:  # its client exits the process after two minutes
        line = ' '.join(str(error).split())[:200]
        raise ConfigurationError(f"Ray did not start at '{address}' ({type(error).__name__}: "
                                 f'{line}); check RAY_ADDRESS, or leave --workers out') from None


def _needs(ray: Any, job: Job) -> dict[str, int]:
    """Return what Ray must reserve for a bag; a task without a GPU would not see any."""
    device = job.settings['parameters']['model']['device']
    if not device.startswith('cuda'):
        return {'num_cpus': 1}
    if not ray.cluster_resources().get('GPU'):  # the tasks would wait for ever
        raise ConfigurationError(f"model.device is '{device}' and Ray finds no GPU; use --device "
                                 'cpu, or leave --workers out')
    if device != 'cuda':
        raise ConfigurationError(f"model.device is '{device}' and Ray chooses the GPU of each "
                                 'worker; use --device cuda')
    return {'num_cpus': 1, 'num_gpus': 1}


def plan_fleet(bags: Sequence[Path], options: OfflineOptions, folder: Path, *, workers: int = 0,
               progress: Progress | None = None, make_planner: Make = load_planner
               ) -> dict[str, Any]:
    """
    Plan many bags; `workers` above 0 asks Ray for so many processors.

    The report is in the order of the bags; `ok` is False when one failed. One run at a time may
    use a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = fleet_jobs(bags, folder, options)
    reports: dict[Path, Mapping[str, Any]] = {}
    for job in jobs:
        if (before := finished(job)) is not None:
            reports[job.bag] = {'report': before, 'resumed': True}
    waiting = [job for job in jobs if job.bag not in reports]
    for job in waiting:
        _tidy(job, folder)
    runs = _ray(waiting, workers, make_planner) if workers and waiting else \
        _serial(waiting, make_planner)
    for job, result in runs:
        reports[job.bag] = result
        if progress is not None:
            progress(len(reports), len(jobs))
    return _summary(jobs, reports, folder)


def _tidy(job: Job, folder: Path) -> None:
    """Remove what a killed run had half written of a bag."""
    for whole in (job.options.records, job.report):
        for part in folder.glob(f'.{escape(whole.name)}.*') if whole is not None else ():
            part.unlink(missing_ok=True)


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
