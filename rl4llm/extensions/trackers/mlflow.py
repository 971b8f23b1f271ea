"""Metrics for MLflow, at MLFLOW_TRACKING_URI, or by default in the database mlflow.db of the working directory."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rl4llm.core.redact import redacted
from rl4llm.extensions.trackers.deferred import Deferred
from rl4llm.tracking.tracker import Row, Tracker

T = TypeVar("T")
TAG = "rl4llm.run_id"
PARAMS_AT_ONCE, METRICS_AT_ONCE, LONGEST_PARAM = 100, 1000, 500  # limits of every MLflow server
UNACCEPTED = re.compile(r"[^\w\-./ :]")
PASSING = (408, 429)  # statuses below 500 after which the same request may succeed


class MlflowTracker(Tracker):
    """Logs to the run of the experiment `project` that has the tag `rl4llm.run_id`; a resumed run continues it.

    The first value of a step is kept: steps that a resumed run repeats are not logged twice. `config` becomes
    parameters, without values whose name indicates a key. Raises ConnectionError if the server does not respond.
    """

    def __init__(self, project: str, run_id: str, name: str, config: Mapping[str, Any]):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the caller retries, and reports it
        import mlflow  # noqa: PLC0415 - an extra

        self._failure = mlflow.exceptions.MlflowException
        self._entities = mlflow.entities
        self._client = self._guarded(mlflow.MlflowClient)
        self._run_id = self._guarded(lambda: self._run(project, run_id, name))
        self._last: dict[bool, int] = {}  # last logged step, separately for evaluations
        self._guarded(lambda: self._log_params(redacted(config)))

    def __str__(self) -> str:
        return "MLflow"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {
            UNACCEPTED.sub("_", name): float(value) for name, value in metrics.items() if math.isfinite(value)
        }
        if not named or step <= self._last_step(named):
            return
        points = [self._entities.Metric(name, value, now, step) for name, value in named.items()]
        for start in range(0, len(points), METRICS_AT_ONCE):
            part = points[start : start + METRICS_AT_ONCE]
            self._guarded(partial(self._client.log_batch, self._run_id, metrics=part))
        self._last[_is_evaluation(named)] = step

    def picture(self, step: int, name: str, file: Path) -> None:
        self._guarded(lambda: self._client.log_artifact(self._run_id, str(file)))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        place = f"{name}/step-{step:06d}.json"
        there = self._guarded(lambda: [file.path for file in self._client.list_artifacts(self._run_id, name)])
        if place not in there:  # MLflow would append the rows to the existing ones
            self._guarded(lambda: self._client.log_table(self._run_id, columns, place))

    def close(self) -> None:
        self._guarded(lambda: self._client.set_terminated(self._run_id))

    def _run(self, project: str, run_id: str, name: str) -> str:
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run_id}'", max_results=1)
        if not runs:
            return self._client.create_run(experiment, run_name=name, tags={TAG: run_id}).info.run_id
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return runs[0].info.run_id

    def _log_params(self, config: Mapping[str, Any]) -> None:
        """Log parameters; MLflow never changes one, so a resumed run keeps its first values."""
        known = self._client.get_run(self._run_id).data.params
        texts = {UNACCEPTED.sub("_", name): str(value)[:LONGEST_PARAM] for name, value in config.items()}
        params = [self._entities.Param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_AT_ONCE])

    def _last_step(self, named: Mapping[str, float]) -> int:
        """Return the last step with metrics of this kind."""
        kind = _is_evaluation(named)
        if kind not in self._last:
            history = self._guarded(lambda: self._client.get_metric_history(self._run_id, next(iter(named))))
            self._last[kind] = max((point.step for point in history), default=-1)
        return self._last[kind]

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._failure as error:
            status = error.get_http_status_code()
            kind = OSError if 400 <= status < 500 and status not in PASSING else ConnectionError
            raise kind(" ".join(str(error).split())[:300]) from error


def open_tracker(
    directory: Path, project: str, run_id: str, config: Mapping[str, Any], warn: Callable[[str], None]
) -> Tracker:
    """Log to MLflow in a thread, so that training never waits for its server."""
    return Deferred("MLflow", lambda: MlflowTracker(project, run_id, directory.name, config), warn)


def _is_evaluation(metrics: Mapping[str, float]) -> bool:
    return next(iter(metrics)).startswith("eval/")
