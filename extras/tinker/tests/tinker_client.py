"""A plain client of the protocol, and a server of it in this process or in another one."""

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections import namedtuple
from contextlib import contextmanager
from itertools import pairwise

import torch
from forked_python import started

from rl4llm.runtime.ports import free_port
from rl4llm_tinker.messages import DTYPES, message, tensor_of
from rl4llm_tinker.models import Base
from rl4llm_tinker.server import application
from rl4llm_tinker.service import Service

NAME = "Qwen/Qwen3-4B-Instruct-2507"
KEY = "tml-test"
COMMIT = "abc"  # any name
Samples = namedtuple("Samples", "tokens logprobs stops prompt_logprobs likely targets sampled_likely")


class Refused(Exception):
    """An error that the server answered with."""


class Client:
    """Speaks as the SDK does, without its patience."""

    def __init__(self, url, key=KEY):
        self.url, self.key = url, key
        self.session = self.call("create_session", sdk_version="0")["session_id"]
        self.samplers = 0

    def post(self, verb, body, kind="application/json", method="POST"):
        headers = {"X-API-Key": self.key, "Content-Type": kind}
        request = urllib.request.Request(f"{self.url}/api/v1/{verb}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                data = answer.read() or b"{}"
                return (
                    data if answer.headers["Content-Type"] == "application/x-protobuf" else json.loads(data)
                )
        except urllib.error.HTTPError as error:
            raise Refused(error.code, json.loads(error.read())["error"]) from None

    def call(self, verb, **body):
        return self.post(verb, json.dumps(body).encode())

    def wait(self, promised):
        """Return the answer to an accepted request."""
        while True:
            answer = self.call("retrieve_future", request_id=promised["request_id"])
            if isinstance(answer, bytes) or answer.get("type") != "try_again":
                break
        if not isinstance(answer, bytes) and "error" in answer:
            raise Refused(answer["category"], answer["error"])
        return answer

    def do(self, verb, **body):
        return self.wait(self.call(verb, **body))

    def model(self, number=0, base_model=NAME, **lora):
        made = {"session_id": self.session, "model_seq_id": number, "base_model": base_model}
        return self.do("create_model", **made, lora_config={"rank": 4, **lora})["model_id"]

    def losses(self, model, seq, data, loss="cross_entropy", **options):
        return read_losses(self.wait(self.ask_losses(model, seq, data, loss, **options)))

    def ask_losses(self, model, seq, data, loss="cross_entropy", forward_only=False, **options):
        given = {
            name: {"text": value} if isinstance(value, str) else {"number": float(value)}
            for name, value in options.items()
        }
        request = message("Request", model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
        request.data.extend(encode_datum(*one) for one in data)
        for name, value in given.items():
            request.options[name].CopyFrom(message("Option", **value))
        return self.post("forward_backward", request.SerializeToString(), "application/x-protobuf")

    def sampler(self, **of):
        """Make a sampling session of `base_model` or `model_path`."""
        self.samplers += 1
        made = self.call(
            "create_sampling_session", session_id=self.session, sampling_session_seq_id=self.samplers, **of
        )
        return made["sampling_session_id"]

    def sample(self, sampler, seq, tokens, count=1, params=None, **asked):
        chunks = [{"type": "encoded_text", "tokens": tokens}]
        body = dict(
            sampling_session_id=sampler, seq_id=seq, num_samples=count, prompt={"chunks": chunks}, **asked
        )
        return read_samples(self.do("asample", **body, sampling_params={"max_tokens": 8, **(params or {})}))


def encode_datum(tokens, inputs):
    text = message("Text", tokens=torch.tensor(tokens, dtype=torch.int32).numpy().tobytes())
    datum = message("Datum", chunks=[message("Chunk", text=text)])
    for name, value in inputs.items():
        datum.inputs[name].CopyFrom(dense(value) if isinstance(value, torch.Tensor) else value)
    return datum


def dense(tensor):
    number = next(number for number, dtype in DTYPES.items() if dtype == tensor.dtype)
    return message("Tensor", dense=tensor.contiguous().numpy().tobytes(), dtype=number, shape=tensor.shape)


def sparse(tensor):
    """Encode a tensor (N, K) in the form that lists what is not 0."""
    csr = tensor.to_sparse_csr()
    names = ("values", "rows", "columns")
    parts = (csr.values(), csr.crow_indices(), csr.col_indices())
    listed = {name: part.numpy().tobytes() for name, part in zip(names, parts, strict=True)}
    number = next(number for number, dtype in DTYPES.items() if dtype == tensor.dtype)
    return message("Tensor", sparse=message("Sparse", **listed), dtype=number, shape=tensor.shape)


def numbers(data, dtype=torch.float32):
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)


def read_losses(body):
    """Return the log-probs of each datum, and the metrics."""
    losses, found = type(message("Losses")).FromString(body), []
    for record in losses.records:
        tensor = record.tensors["logprobs"]
        ends = numbers(tensor.ends, torch.int64).tolist()
        assert len(ends) == record.count + 1
        rows = [numbers(tensor.data[a:b]) for a, b in pairwise(ends)]
        found += [row.view(-1, *tensor.trailing_shape) for row in rows]
    return found, dict(losses.metrics)


def read_samples(body):
    samples = type(message("Samples")).FromString(body)

    def matrix(top):
        shape = top.length, top.count
        return numbers(top.tokens, torch.int32).view(shape), numbers(top.logprobs).view(shape)

    return Samples(
        [numbers(one.tokens, torch.int32).tolist() for one in samples.sequences],
        [numbers(one.logprobs) for one in samples.sequences],
        ["stop" if one.stop_reason == 0 else "length" for one in samples.sequences],
        numbers(samples.prompt_logprobs) if samples.HasField("prompt_logprobs") else None,
        matrix(samples.prompt_likely) if samples.HasField("prompt_likely") else None,
        tensor_of("", samples.targets, samples.targets.shape[0]) if samples.HasField("targets") else None,
        [matrix(one.likely) for one in samples.sequences],
    )


def put_into_cache(hub, name, model_dir):
    """Put a model below a directory where the libraries of the hub look for it, as a download would."""
    cached = hub / f"models--{name.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    shutil.copytree(model_dir, cached / "snapshots" / COMMIT)


@contextmanager
def served_here(model_dir, output, idle_s=1000.0):
    """Yield the address of a server in a thread of this process, and its service."""
    import asyncio

    from aiohttp import web

    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        service = Service({NAME: Base(NAME, str(model_dir), "float32")}, output, "float32", idle_s)
        runner = web.AppRunner(application(service, KEY))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.extend([runner, f"http://127.0.0.1:{runner.addresses[0][1]}", service])
        ready.set()

    def run():
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(found[0].cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        yield found[1], found[2]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def served_apart(model_dir, output, *options):
    """Yield the address of `rl4llm serve tinker` in another process, and its id."""
    port = free_port("127.0.0.1")
    words = ("--model", f"{NAME}={model_dir}", "--output", output, "--port", port, "--key", KEY, *options)
    with started("-m", "rl4llm", "serve", "tinker", *words) as program:
        deadline = time.monotonic() + 60
        while "Ctrl-C stops it" not in program.out.read_text() + program.err.read_text():
            assert program.process.is_alive() and time.monotonic() < deadline, program.err.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", program.process.pid
