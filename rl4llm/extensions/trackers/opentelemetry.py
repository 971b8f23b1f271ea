"""A span for each step, with one for each of its phases, for OpenTelemetry."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from rl4llm.tracking.tracker import TimedPhase, TrackedRun, Tracker

EXPORTERS = "opentelemetry_traces_exporter"
"""The entry points of the packages that send spans."""


class OpenTelemetryTracker(Tracker):
    """Sends a trace for each step: the span "step" with step, version, episodes and tokens, and in it the phases.

    The evaluation and the checkpoint that follow a step belong to its trace. The variables OTEL_* of OpenTelemetry name the
    service and the exporters: by default OTLP over HTTP to localhost:4318. If the program has a provider of traces, as under
    `opentelemetry-instrument`, that one is used. Spans are sent from another thread.
    """

    def __init__(self, run: TrackedRun):
        self._run = {
            "rl4llm.run": run.directory.name,
            "rl4llm.run_id": run.run_id,
            "rl4llm.project": run.project,
        }
        self._exporters: list[_Exporter] = []
        provider = trace.get_tracer_provider()
        self._provider = None if isinstance(provider, TracerProvider) else self._make_provider()
        self._tracer = (self._provider or provider).get_tracer("rl4llm")
        self._metrics: Mapping[str, float] = {}
        self._last: trace.Span | None = None

    def __str__(self) -> str:
        return "OpenTelemetry"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not any(name.startswith("eval/") for name in metrics):
            self._metrics = metrics

    def phases(self, step: int, phases: Sequence[TimedPhase]) -> None:
        """Send the spans of a step. What ran before it began belongs to the step before."""
        whole = next((phase for phase in phases if phase.name == "step"), None)
        before = [phase for phase in phases if whole is None or phase.start < whole.start]
        self._send(before, self._last)
        if whole is not None:
            about: dict[str, str | int] = {**self._run, "rl4llm.step": step, "rl4llm.version": step}
            for name, metric in (("episodes", "trajectories"), ("tokens", "update/tokens")):
                if metric in self._metrics:
                    about[f"rl4llm.{name}"] = int(self._metrics[metric])
            root = trace.set_span_in_context(trace.INVALID_SPAN)
            self._last = self._tracer.start_span("step", root, attributes=about, start_time=_ns(whole.start))
            self._send([phase for phase in phases if phase is not whole and phase not in before], self._last)
            self._last.end(_ns(whole.end))
        self._check()

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
        self._check()

    def _send(self, phases: Sequence[TimedPhase], parent: trace.Span | None) -> None:
        within = trace.set_span_in_context(parent or trace.INVALID_SPAN)
        for phase in phases:
            start = _ns(phase.start)
            self._tracer.start_span(phase.name, within, attributes=self._run, start_time=start).end(
                _ns(phase.end)
            )

    def _make_provider(self) -> TracerProvider:
        named = Resource({"service.name": "rl4llm"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=Resource.create().merge(named))
        self._exporters = [_Exporter(exporter) for exporter in exporters()]
        for exporter in self._exporters:
            provider.add_span_processor(BatchSpanProcessor(exporter))
        return provider

    def _check(self) -> None:
        """Raise OSError if spans could not be sent since the last call."""
        for exporter in self._exporters:
            lost, exporter.lost = exporter.lost, 0
            if lost:
                raise OSError(f"{lost} spans could not be sent; see OTEL_EXPORTER_OTLP_ENDPOINT")


class _Exporter(SpanExporter):
    """Counts the spans that an exporter could not send."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self.lost += len(spans) * (result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def exporters() -> list[SpanExporter]:
    """Return the exporters of OTEL_TRACES_EXPORTER, by default "otlp"; raise OSError for one that cannot be made."""
    log = logging.getLogger("opentelemetry.exporter")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)  # it logs each failure, and the run reports the first
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, variables)), "http")
    aliases = {"otlp": "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"}
    names = [name.strip() for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")]
    points = {point.name: point for point in entry_points(group=EXPORTERS)}
    try:
        return [points[aliases.get(name, name)].load()() for name in names if name not in ("", "none")]
    except (KeyError, ImportError, ValueError) as error:  # a package is missing or broken, or a variable is
        raise OSError(f"OTEL_TRACES_EXPORTER={','.join(names)}: {error!r}") from error


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
