"""A plain client of the protocol, and a server of it in this process or in another one."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import namedtuple
from contextlib import contextmanager
from itertools import pairwise

import torch
from forked_python import started

from rl4llm.extensions.tinker.messages import DTYPES, encode_tensor, tensor_of
from rl4llm.extensions.tinker.models import Base
from rl4llm.extensions.tinker.protobuf import blobs, entries, field, integer, parse
from rl4llm.extensions.tinker.server import application
from rl4llm.extensions.tinker.service import Service
from rl4llm.runtime.ports import free_port

NAME = "Qwen/Qwen3-4B-Instruct-2507"
KEY = "tml-test"
Samples = namedtuple("Samples", "tokens logprobs stops prompt_logprobs likely targets")


class Refused(Exception):
    """An error that the server answered with."""


class Client:
    """Speaks as the SDK does, without its patience."""

    def __init__(self, url, key=KEY):
        self.url, self.key = url, key
        self.session = self.call("create_session", sdk_version="0")["session_id"]
        self.samplers = 0

    def post(self, verb, body, kind="application/json"):
        headers = {"X-API-Key": self.key, "Content-Type": kind}
        request = urllib.request.Request(f"{self.url}/api/v1/{verb}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                data = answer.read()
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
        body = field(1, model) + field(2, seq) + b"".join(field(3, encode_datum(*one)) for one in data)
        body += field(4, loss) + field(6, int(forward_only))
        for name, value in options.items():
            number = field(2, value) if isinstance(value, str) else field(1, float(value))
            body += field(7, field(1, name) + field(2, number))
        return self.post("forward_backward", body, "application/x-protobuf")

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
    chunk = field(1, field(1, torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()))
    named = (
        field(1, name) + field(2, value if isinstance(value, bytes) else encode_tensor(value))
        for name, value in inputs.items()
    )
    return field(1, chunk) + b"".join(field(2, entry) for entry in named)


def sparse(tensor):
    """Encode a tensor (N, K) in the form that lists what is not 0."""
    csr = tensor.to_sparse_csr()
    parts = (csr.values(), csr.crow_indices(), csr.col_indices())
    body = b"".join(field(number, part.numpy().tobytes()) for number, part in enumerate(parts, 1))
    number = next(number for number, dtype in DTYPES.items() if dtype == tensor.dtype)
    return field(2, body) + field(3, number) + b"".join(field(4, size) for size in tensor.shape)


def read_losses(body):
    """Return the log-probs of each datum, and the metrics."""
    fields, found = parse(body), []
    for record in map(parse, blobs(fields, 2)):
        tensor = entries(record, 2)["logprobs"]
        ends = torch.frombuffer(bytearray(blobs(tensor, 2)[0]), dtype=torch.int64).tolist()
        assert len(ends) == integer(record, 3) + 1
        data = blobs(tensor, 1)[0]
        rows = [torch.frombuffer(bytearray(data[a:b]), dtype=torch.float32) for a, b in pairwise(ends)]
        width = blobs(tensor, 4)
        found += [row.view(-1, width[0][0]) if width else row for row in rows]
    return found, entries(fields, 3)


def read_samples(body):
    fields = parse(body)
    sequences = [parse(data) for data in blobs(fields, 1)]

    def numbers(data, dtype=torch.float32):
        return torch.frombuffer(bytearray(data), dtype=dtype)

    def matrix(data):
        top = parse(data)
        shape = integer(top, 4), integer(top, 3)
        return numbers(blobs(top, 1)[0], torch.int32).view(shape), numbers(blobs(top, 2)[0]).view(shape)

    return Samples(
        [numbers(blobs(one, 2)[0], torch.int32).tolist() for one in sequences],
        [numbers(blobs(one, 3)[0]) for one in sequences],
        ["stop" if integer(one, 1) == 0 else "length" for one in sequences],
        next(map(numbers, blobs(fields, 2)), None),
        next(map(matrix, blobs(fields, 3)), None),
        next((tensor_of(parse(data)) for data in blobs(fields, 5)), None),
    )


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
