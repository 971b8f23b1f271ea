"""An inference server that breaks on request: SGLang's endpoints over real HTTP, a tiny real model behind them.

server = FaultServer(model, tokenizer)
await server.start()
server.next("/generate", status(503), reset())     # the next two requests
server.at("/generate", {17: kill()})                # the request with this number
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import math
import random
import socket
import struct
import threading
from collections import Counter
from pathlib import Path

import torch
from aiohttp import ClientError, ClientSession, web
from safetensors import SafetensorError
from safetensors.torch import load_file

from rl4llm.backends.tiny import build_model
from rl4llm.core.errors import EngineError
from rl4llm.core.types import Completion, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.transport import Retry


def status(code, *, retry_after=None, text="scripted"):
    """Return a status code before the request is handled."""

    async def fault(server, request, answer):
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return web.Response(status=code, text=text, headers=headers)

    return fault


def text(body, *, code=200):
    """Return `body` as the answer."""
    return status(code, text=body)


def hang():
    """Never answer, for as long as the client waits or the server lives."""

    async def fault(server, request, answer):
        await asyncio.Event().wait()

    return fault


def reset(*, after=False):
    """Send a TCP reset instead of an answer, before or after the request is handled."""

    async def fault(server, request, answer):
        if after:
            await answer()
        sock = request.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
        await asyncio.Event().wait()

    return fault


def raw(make):
    """Reply with what `make` turns the right answer's body into; close the connection if the reply asks for it."""

    async def fault(server, request, answer):
        content, close = make(json.dumps(await answer()).encode())
        request.transport.write(content)
        if close:
            request.transport.close()
        await asyncio.Event().wait()

    return fault


def _head(length):
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def half_body():
    """Send the first half of the answer, then close the connection."""
    return raw(lambda body: (_head(len(body)) + body[: len(body) // 2], True))


def too_long_a_length():
    """Send a Content-Length that promises more than comes."""
    return raw(lambda body: (_head(len(body) + 100) + body, True))


def too_short_a_length():
    """Send a Content-Length that ends the body early; the rest of it follows on the open connection."""
    return raw(lambda body: (_head(len(body) - 20) + body, False))


def edited(change):
    """Send the right answer after `change` edited it."""

    async def fault(server, request, answer):
        found = await answer()
        changed = change(found)
        return web.json_response(changed if isinstance(changed, dict) else found)

    return fault


def twice():
    """Send the right answer, and a moment later the same one again on the same connection."""

    async def fault(server, request, answer):
        found = await answer()
        body = json.dumps(found).encode()
        again = request.transport
        asyncio.get_running_loop().call_later(0.02, again.write, _head(len(body)) + body)
        return web.json_response(found)

    return fault


def shifted():
    """Send another request's answer, and later the right one, which the next request on this connection gets."""

    async def fault(server, request, answer):
        found = await answer()
        body = json.dumps(found | {"meta_info": found["meta_info"] | {"id": "1/of/another"}}).encode()
        request.transport.write(_head(len(body)) + body)
        await asyncio.sleep(0.3)
        return web.json_response(found)

    return fault


def kill(*, after=False):
    """Kill the server, as with kill -9, before or after the request is handled."""

    async def fault(server, request, answer):
        if after:
            await answer()
        server.kill()
        await asyncio.Event().wait()

    return fault


def lie():
    """Report success without doing anything."""

    async def fault(server, request, answer):
        return web.json_response({"success": True, "message": "scripted"})

    return fault


def slow(seconds):
    """Send the right answer late."""

    async def fault(server, request, answer):
        await asyncio.sleep(seconds)
        return web.json_response(await answer())

    return fault


def done_but_damaged():
    """Handle the request and change one weight afterwards."""

    async def fault(server, request, answer):
        found = await answer()
        server.damage(0.5)
        return web.json_response(found)

    return fault


def done_but_denied():
    """Handle the request and report a failure."""

    async def fault(server, request, answer):
        await answer()
        return web.json_response({"success": False, "message": "scripted"}, status=400)

    return fault


def small_model(tokenizer, seed=0):
    """Return weights that differ by seed."""
    return build_model(tokenizer, seed=seed, hidden_size=32, num_layers=1).eval()


def change(model, seed, scale=0.05):
    """Give all parameters other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def logprobs(model, prompt_ids, token_ids):
    """Return what a plain forward gives for the tokens after a prompt."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.no_grad():
        logp_TV = model(ids).logits[0].log_softmax(-1)
    return [logp_TV[place - 1, ids[0, place]].item() for place in range(len(prompt_ids), ids.shape[1])]


def write_weights(root, tokenizer, versions):
    """Write directories with different weights by version, as a trainer publishes them."""
    for version in versions:
        small_model(tokenizer, seed=version).save_pretrained(root / f"v{version}")
    return {version: WeightRef(version, "full", str(root / f"v{version}")) for version in versions}


def free_port():
    """Return a port below the ephemeral range, so that no other connection takes it while the server is down.

    It is also below the ports of `rl4llm.runtime.ports`: a real server has chosen one of those while it boots.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 20000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


class FaultServer:
    """One server. `rids` holds the id of every request for tokens, `calls` counts requests by path.

    A kill loses the weights: after `start` it has those it was built with, and the version "default", as a server that
    somebody restarted. One that works `one_by_one` gives the same bits for the same request, whatever else it is asked.
    """

    def __init__(self, model, tokenizer, *, one_by_one=False):
        self._base, self._tokenizer = model, tokenizer
        self.port = free_port()
        self.calls = Counter()
        self.rids = []
        self.bodies = []
        self.stays_paused = self.partitioned = self.paused = False
        self._faults = {}
        self._runner = None
        self._turn = asyncio.Semaphore(1) if one_by_one else contextlib.nullcontext()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self):
        return self._runner is not None

    async def start(self):
        """Boot with the base weights."""
        self.model = copy.deepcopy(self._base)
        self.engine = LocalClient(self.model, self._tokenizer, path="fast", stall_timeout_s=60)
        self.weight_version, self.paused = "default", False
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    def kill(self):
        """Drop every connection, with what was under way in it, and listen no more."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            site._server.close()
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._cleanup = asyncio.ensure_future(runner.cleanup())

    async def stop(self):
        """Stop, and wait until nothing is left of it."""
        self.kill()
        if hasattr(self, "_cleanup"):
            await asyncio.gather(self._cleanup, self.engine.close())

    def next(self, path, *faults):
        """Script the next requests of a path, one fault each; None is none."""
        begin = max([self.calls[path], *(1 + number for where, number in self._faults if where == path)])
        self.at(path, {begin + i: fault for i, fault in enumerate(faults)})

    def at(self, path, faults):
        """Script requests of a path by their number since the server was made."""
        self._faults.update({(path, number): fault for number, fault in faults.items() if fault})

    def shares_faults_with(self, other):
        """Count requests together with another server, so that a fault strikes whichever gets the request."""
        self.calls, self._faults = other.calls, other._faults

    def heal(self):
        """Restore the network; what was sent into the partition is lost."""
        self.partitioned = False

    def damage(self, value):
        """Change a weight behind everybody's back."""
        with torch.no_grad():
            next(self.model.parameters())[:] = value
        self.engine._engine.take_weights(self.engine._engine.version)

    def connections(self):
        """Return the open ones."""
        return [item for item in self._runner.server.connections if item.transport is not None]

    async def busy(self):
        """Return requests that the engine still works on."""
        found = await self.engine.health()
        return found["rows_active"] + found["waiting"]

    async def _serve(self, request):
        path = request.path
        number, self.calls[path] = self.calls[path], self.calls[path] + 1
        if self.partitioned:
            await asyncio.Event().wait()
        body = json.loads(await request.read() or b"{}")
        fault = self._faults.pop((path, number), None)
        endpoint = getattr(self, "_" + path.strip("/"), None)
        if endpoint is None:
            return web.Response(status=404, text=f"no {path}")
        try:
            if fault is not None:
                return await fault(self, request, lambda: endpoint(body))
            found = await endpoint(body)
            return found if isinstance(found, web.Response) else web.json_response(found)
        except _Refusal as refusal:
            return web.json_response({"success": False, "message": str(refusal)}, status=400)

    async def _generate(self, body):
        rid, ids = body["rid"], body["input_ids"]
        self.bodies.append(body)
        if rid in self.rids:
            raise _Refusal(f"Duplicate request ID: {rid}")
        self.rids.append(rid)
        if not all(0 <= token < self.engine.vocab_size for token in ids):
            self.kill()
            await asyncio.Event().wait()
        meta = {"id": rid, "weight_version": self.weight_version, "prompt_tokens": len(ids)}
        if "logprob_start_len" in body:
            return {"output_ids": [0], "meta_info": {**meta, **await self._scored(ids)}}
        completion = await self._sampled(ids, body["sampling_params"])
        rows = [
            [logprob, token, None]
            for logprob, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        runs = completion.versions or ((0, completion.version),)
        ends = [*(start for start, _ in runs[1:]), len(rows)]
        spans = [
            {"version": "default" if version < 0 else str(version), "start": start, "end": end}
            for (start, version), end in zip(runs, ends, strict=True)
        ]
        return {
            "text": completion.text,
            "output_ids": list(completion.token_ids),
            "meta_info": {
                **meta,
                "weight_version": spans[0]["version"],
                "weight_versions": spans,
                "finish_reason": {"type": completion.finish_reason},
                "output_token_logprobs": rows,
            },
        }

    async def _scored(self, ids):
        scores = await self.engine.score(ids)
        rows = [[logprob, token, None] for logprob, token in zip([None, *scores], ids, strict=True)]
        return {"input_token_logprobs": rows, "finish_reason": {"type": "length"}}

    async def _sampled(self, ids, params):
        wanted = SamplingParams(
            max_tokens=params["max_new_tokens"],
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=max(0, params["top_k"]),
            stop=tuple(params.get("stop", ())),
            stop_token_ids=tuple(params["stop_token_ids"]),
            seed=params["sampling_seed"],
            ignore_eos=params["ignore_eos"],
        )
        try:
            async with self._turn:
                return await self.engine.generate(ids, wanted)
        except EngineError as error:
            if "not finite" not in str(error):
                raise _Refusal(str(error)) from error
            count = params["max_new_tokens"]  # the embedded engine says so; SGLang goes on
            return Completion("", (0,) * count, (math.nan,) * count, "length", self.engine._engine.version)

    async def _update_weights_from_disk(self, body):
        if await self.busy() and not self.paused:
            raise _Refusal("requests are running")
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            raise _Refusal(f"Failed to get weights iterator: {body['model_path']} holds no weights")
        try:
            tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
            self.model.load_state_dict(tensors, strict=False)
        except (SafetensorError, RuntimeError):
            self.kill()
            await asyncio.Event().wait()
        self.weight_version = str(body["weight_version"])
        await self.engine.load(WeightRef(int(self.weight_version.partition(" ")[0])))
        return {"success": True, "message": "Succeeded to update model weights."}

    async def _weights_checker(self, body):
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return {"success": True, "message": "", "per_engine_checksum": digest.hexdigest()}

    async def _model_info(self, body):
        return {"weight_version": self.weight_version, "model_path": "base"}

    async def _server_info(self, body):
        return {"version": "0.5.23", "tp_size": 1, "device": "cpu"}

    async def _health(self, body):
        """It generates a token, which a paused server does not."""
        while self.paused:
            await asyncio.sleep(0.01)
        return {}

    async def _pause_generation(self, body):
        self.paused = True
        await self.engine.pause()
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue_generation(self, body):
        if not self.stays_paused:
            self.paused = False
            await self.engine.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush_cache(self, body):
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.")

    async def _update_weight_version(self, body):
        self.weight_version = body["new_version"]
        return {"success": True, "message": f"Weight version updated to {self.weight_version}"}

    async def _release_memory_occupation(self, body):
        return None

    async def _resume_memory_occupation(self, body):
        return None

    async def _abort_request(self, body):
        return None


def client_of(url, tokenizer, retry=None, **options):
    """Return a client for servers of `small_model`; with `retry` it does not wait long."""
    sizes = {"vocab_size": len(tokenizer), "context_length": 128}
    client = SGLangClient(url, tokenizer, **{**sizes, **options})
    client.retry = retry or client.retry
    return client


@contextlib.asynccontextmanager
async def started(server, tokenizer, retry=None, **options):
    """Run a server in this event loop; yield a client of it."""
    await server.start()
    client = client_of(server.url, tokenizer, retry or Retry(2, first_wait_s=0.001), **options)
    try:
        async with asyncio.timeout(60):
            yield client
    finally:
        await client.close()
        await server.stop()


@contextlib.contextmanager
def serving(*servers, revive=False):
    """Run servers in a thread; with `revive` one that dies starts again with the weights of its first start."""
    up, end = threading.Event(), threading.Event()

    async def serve():
        while not end.is_set():
            for server in servers:
                if not server.running and (revive or not up.is_set()):
                    await server.start()
            up.set()
            await asyncio.sleep(0.05)
        await asyncio.gather(*(server.stop() for server in servers))

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert up.wait(30)
        yield servers[0]
    finally:
        end.set()
        thread.join()


class Router:
    """A router in front of servers, as sglang-router is one: requests go to them in turn, and what fails to the next one.

    It asks again with the very same body, id included, up to `tries` times, and its health is "OK", which is not JSON.
    """

    def __init__(self, servers, tries=3):
        self.port = free_port()
        self.calls = Counter()
        self._servers, self._runner = servers, None
        self._tries, self._turn = tries, 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        self._session = ClientSession()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self):
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
            await self._session.close()

    async def _pass_on(self, request):
        self.calls[request.path] += 1
        if request.path == "/health":
            return web.Response(text="OK")
        body = await request.read()
        for _ in range(self._tries):
            status, content = await self._ask_next(request.path, body)
            if status < 500 and status != 429:
                break
        return web.Response(status=status, body=content)

    async def _ask_next(self, path, body):
        server = self._servers[self._turn % len(self._servers)]
        self._turn += 1
        try:
            async with self._session.post(server.url + path, data=body) as answer:
                return answer.status, await answer.read()
        except ClientError as error:
            return 500, str(error).encode()


class _Refusal(Exception):
    """A 400 with a reason."""
