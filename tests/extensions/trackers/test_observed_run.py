"""A run that real packages watch: its spans arrive at an OTLP receiver, and its gauges are scraped while it trains."""

import contextlib
import socket
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl4llm.api import GRPOTrainer
from rl4llm.tracking.tracker import read_jsonl

pytest.importorskip("opentelemetry.sdk", reason="pip install 'rl4llm[opentelemetry]'")
prometheus = pytest.importorskip("prometheus_client.parser", reason="pip install 'rl4llm[prometheus]'")

ROWS = [{"prompt": f"What is {n} + 1?", "ground_truth": str(n + 1)} for n in range(4)]
STEPS = 3


class Receiver(BaseHTTPRequestHandler):
    """Takes what an OTLP exporter sends."""

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Print nothing."""


@contextlib.contextmanager
def receiver():
    """Serve a receiver; yield its address and what it received."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Receiver,), {"received": []}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", server.RequestHandlerClass.received
    server.shutdown()
    server.server_close()
    thread.join()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def gauges(port):
    """Return the values of the port's gauges, their descriptions, and their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(prometheus.text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} <= {"gauge"}
    samples = {family.name: family.samples[0] for family in families}
    return samples, {family.name: family.documentation for family in families}


def train(directory, model_dir, rewards, **tracking):
    trainer = GRPOTrainer(
        str(model_dir), ROWS, rewards, eval_dataset=ROWS, eval={"every": 2}, max_steps=STEPS,
        rollout={"prompts": 2, "group_size": 2, "max_tokens": 4}, output={"dir": str(directory)},
        tracking={"tensorboard": False, "project": "watched", **tracking},
    )  # fmt: skip
    return trainer.train()


@pytest.fixture(scope="module")
def watched(model_dir, tmp_path_factory):
    """Return a run, the OTLP requests, the port, and what was scraped from it before each rollout was scored."""
    port, scraped, patch = free_port(), [], pytest.MonkeyPatch()

    def scraping(completions, **columns):
        scraped.append(gauges(port))
        return [float(number % 2) for number, _ in enumerate(completions)]

    with receiver() as (address, received), patch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=desk")
        trainer = train(
            tmp_path_factory.mktemp("runs") / "one",
            model_dir,
            [scraping],
            opentelemetry=True,
            prometheus=port,
        )
    return trainer.trainer.run, received, port, scraped


def sent(received):
    """Return the spans of all requests as (name, trace, parent, start, end, attributes), by their start."""
    spans = []
    for _, request in received:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                spans += scope.spans
    return sorted(spans, key=lambda span: span.start_time_unix_nano)


def attributes(span):
    return {one.key: one.value.int_value or one.value.string_value for one in span.attributes}


def test_a_step_is_a_trace_with_its_phases(watched):
    run, received, _, _ = watched
    assert {path for path, _ in received} == {"/v1/traces"}
    spans = sent(received)
    steps = {span.span_id: span for span in spans if span.name == "step"}
    assert [attributes(span)["rl4llm.step"] for span in steps.values()] == [1, 2, 3]
    rows = [row for row in read_jsonl(run.metrics_file) if "tokens/s" in row]
    for row, (number, step) in zip(rows, steps.items(), strict=True):
        about = attributes(step)
        assert about["rl4llm.version"] == row["step"] and about["rl4llm.episodes"] == row["trajectories"] == 4
        assert about["rl4llm.tokens"] == row["update/tokens"] > 0 and about["rl4llm.run_id"] == run.run_id
        inside = [span for span in spans if span.parent_span_id == number]
        names = [span.name for span in inside if span.end_time_unix_nano <= step.end_time_unix_nano]
        assert [*dict.fromkeys(names)] == ["rollout", "prepare", "update", "verify", "publish"]
        assert all(span.trace_id == step.trace_id for span in inside)
        assert min(span.start_time_unix_nano for span in inside) >= step.start_time_unix_nano
        seconds = (step.end_time_unix_nano - step.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(row["time/step"], abs=1e-5)
    assert abs(spans[-1].end_time_unix_nano / 1e9 - time.time()) < 600


def test_an_evaluation_belongs_to_the_step_before_it(watched):
    spans = sent(watched[1])
    steps = {span.span_id: attributes(span)["rl4llm.step"] for span in spans if span.name == "step"}
    after = [steps.get(span.parent_span_id, 0) for span in spans if span.name == "evaluate"]
    assert after == [0, 2, 3]
    saved = [steps.get(span.parent_span_id) for span in spans if span.name == "checkpoint"]
    assert saved == [STEPS]


def test_variables_of_opentelemetry_name_the_service(watched):
    resources = [resource for _, request in watched[1] for resource in request.resource_spans]
    about = {one.key: one.value.string_value for one in resources[0].resource.attributes}
    assert about["service.name"] == "rl4llm" and about["deployment.environment"] == "desk"
    assert about["telemetry.sdk.name"] == "opentelemetry"


def test_gauges_are_the_newest_metrics_with_their_meaning(watched):
    run, _, _, scraped = watched
    values, documentation = next(
        found
        for found in reversed(scraped)
        if found[0].get("rl4llm_step") and found[0]["rl4llm_step"].value == STEPS - 1
    )
    rows = [row for row in read_jsonl(run.metrics_file) if row["step"] == STEPS - 1]
    expected = {name: value for row in rows for name, value in row.items() if name != "step"}
    assert len(values) == len(expected) + 1 > 40
    for name in ("reward/mean", "completion_length/p90", "tokens/s", "time/step", "eval/reward/mean"):
        gauge = values[f"rl4llm_{name.replace('/', '_')}"]
        assert gauge.value == pytest.approx(expected[name])
        assert gauge.labels == {"project": "watched", "run": "one"}
    assert documentation["rl4llm_reward_mean"] == "reward/mean: Mean combined reward."


def test_the_port_is_closed_after_the_run_and_was_on_loopback(watched):
    with pytest.raises(OSError):
        gauges(watched[2])


def even(completions, **columns):
    return [float(number % 2) for number, _ in enumerate(completions)]


def test_a_receiver_that_is_gone_is_reported_once(model_dir, tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    train(tmp_path / "run", model_dir, [even], opentelemetry=True)
    printed, _ = capfd.readouterr()
    assert printed.count("OpenTelemetry cannot be written") == 1 and "step 3/3" in printed
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry.exporter")]


def test_a_port_in_use_and_an_unknown_exporter_stop_nothing(model_dir, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        train(tmp_path / "run", model_dir, [even], opentelemetry=True, prometheus=taken.getsockname()[1])
    printed, _ = capfd.readouterr()
    names = ("prometheus", "opentelemetry")
    assert [printed.count(f"{name} cannot be written") for name in names] == [1, 1] and "step 3/3" in printed


def test_a_provider_of_the_program_gets_the_spans(model_dir, tmp_path, monkeypatch):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    train(tmp_path / "run", model_dir, [even], opentelemetry=True)
    assert [span.name for span in kept.get_finished_spans()].count("step") == STEPS
    with provider.get_tracer("test").start_as_current_span("later"):
        pass
    assert kept.get_finished_spans()[-1].name == "later"  # the run did not shut it down
