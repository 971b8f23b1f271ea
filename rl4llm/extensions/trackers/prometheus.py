"""The newest metrics of a run for Prometheus, on a port of loopback."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rl4llm.tracking.glossary import find
from rl4llm.tracking.tracker import TrackedRun, Tracker

LABELS = ("project", "run")


class PrometheusTracker(Tracker):
    """Serves each metric of `metrics.jsonl` as a gauge: "reward/mean" is ``rl4llm_reward_mean{project="...",run="..."}``.

    `tracking.prometheus` is the port, on 127.0.0.1. The gauges are those of the last step and of the last evaluation.
    """

    def __init__(self, run: TrackedRun):
        self._gauges = _Gauges((run.project, run.directory.name))
        registry = CollectorRegistry()
        registry.register(self._gauges)
        self._server, self._thread = start_http_server(
            run.config["tracking.prometheus"], "127.0.0.1", registry
        )

    def __str__(self) -> str:
        return "Prometheus"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        evaluated = any(name.startswith("eval/") for name in metrics)
        values = self._gauges.values.items()
        earlier = {name: value for name, value in values if name.startswith("eval/") is not evaluated}
        self._gauges.values = {**earlier, **metrics, "step": step}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Gauges(Collector):
    """The newest value of each metric, by its name in the project; `labels` are the values of LABELS."""

    def __init__(self, labels: tuple[str, ...]):
        self._labels = labels
        self.values: Mapping[str, float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # Prometheus refuses a name twice
        named = {re.sub(r"[^a-zA-Z0-9]", "_", name): name for name in self.values}
        for allowed, name in named.items():
            entry = find(name)
            about = f"{name}: {entry.meaning}" if entry else name
            gauge = GaugeMetricFamily(f"rl4llm_{allowed}", about, labels=LABELS)
            gauge.add_metric(self._labels, self.values[name])
            yield gauge
