"""The embedded engine as a server: what it samples, which weights it holds, and what it refuses."""

import asyncio
import contextlib
import copy
import shutil
import statistics
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection

import pytest
import torch
from aiohttp import web
from embedded_server import embedded_server
from ended_runs import assert_same_weights, metrics, weights
from fault_server import change, logprobs
from kept_cache import by_parts
from later import later
from safetensors.torch import load_file, save_file
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ConfigError, EngineError, RefusedError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.envs import chat_completions as chat
from rl4llm.extensions.servers.clients.embedded import EmbeddedClient
from rl4llm.extensions.servers.embedded import server
from rl4llm.extensions.servers.embedded.openai import OpenAIEndpoints
from rl4llm.extensions.servers.embedded.options import read_options
from rl4llm.extensions.servers.embedded.server import EmbeddedServer
from rl4llm.extensions.servers.fleet.fleet import FleetClient
from rl4llm.extensions.servers.fleet.member import FleetLimits
from rl4llm.extensions.servers.server_command import server_command
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.ports import free_port
from rl4llm.sync.verify import Canary
from rl4llm.testing import check_client

PROMPT = [5, 9, 40, 33, 7]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=2**62 + 5, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
KEY = "a-5ecret"


@pytest.fixture(scope="module")
def url(model_dir):
    with embedded_server(model_dir) as (url, _):
        yield url


@pytest.fixture(scope="module")
def one_by_one(model_dir):
    """A server that answers one request after the other, and only with a key."""
    with embedded_server(model_dir, "inference.max_rows=1", "--api-key", KEY) as (url, _):
        yield url


def client_of(url, tokenizer, **options):
    return EmbeddedClient(url, tokenizer, vocab_size=len(tokenizer), context_length=512, **options)


@pytest.fixture
def play(url, tokenizer):
    """Return play(scene): run the coroutine function `scene(client)`."""

    def run(scene, url=url, **options):
        async def whole():
            client = client_of(url, tokenizer, **options)
            try:
                return await scene(client)
            finally:
                await client.close()

        return asyncio.run(whole())

    return run


@pytest.fixture
def backend(model):
    return TorchBackend(load_model(model), lr=1e-3)


async def busy(client):
    info = await client.http.get("/server_info")
    return info["rows_active"] + info["waiting"]


async def until(holds):
    async with asyncio.timeout(30):
        while not await holds():
            await asyncio.sleep(0.005)


def test_it_keeps_the_contract_of_clients(url, tokenizer):
    check_client(client_of(url, tokenizer), [PROMPT, [8, 100, 3]], tolerance=1e-5)


def test_samples_equal_those_of_the_engine_in_process(play, model, tokenizer, one_by_one, model_dir):
    prompts = [PROMPT, PROMPT, [8, 100, 3], [7] * 40]
    params = [SAMPLED.replace(seed=SAMPLED.seed + number, max_tokens=20 + number) for number in range(4)]

    async def together(client):
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(*(client.generate(*pair) for pair in pairs))

    own = LocalClient(load_model(model_dir), tokenizer, max_rows=1).generate_batch(prompts, params)
    bits = play(together, one_by_one, api_key=KEY)
    assert [(item.token_ids, item.logprobs, item.text) for item in bits] == [
        (item.token_ids, item.logprobs, item.text) for item in own
    ]
    batched = play(together)
    for found, expected in zip(batched, own, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_grammar_constrains_the_server_as_the_engine(play, tokenizer, model_dir):
    params = SamplingParams(
        max_tokens=20, seed=3, grammar=f"start: /[ab]{{3,9}}/ <[{tokenizer.eos_token_id}]>"
    )
    (own,) = LocalClient(load_model(model_dir), tokenizer).generate_batch([PROMPT], [params])

    async def scene(client):
        assert client.constrains
        return await client.generate(PROMPT, params)

    found = play(scene)
    assert found.text.strip("ab") == "" and (found.token_ids, found.grammar) == (
        own.token_ids,
        params.grammar,
    )
    assert found.logprobs == pytest.approx(own.logprobs, abs=1e-5)


def test_the_openai_package_parses_what_the_server_forces(url, model_dir):
    class Coins(later.pydantic.BaseModel):
        sure: bool

    with later.openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": str(model_dir), "messages": [{"role": "user", "content": "How many?"}]}
        answer = client.chat.completions.parse(response_format=Coins, **asked)
    assert answer.choices[0].message.parsed.sure in (True, False)


def train(model_dir, directory, inference, steps=3, **keys):
    rows = [{"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": ""} for i in range(4)]
    done = GRPOTrainer(
        str(model_dir),
        rows,
        [Vowels()],
        output={"dir": str(directory)},
        inference=inference,
        rollout={"prompts": 4, "group_size": 4, "max_tokens": 8},
        training={"lr": 3e-3},
        mismatch={"stop_above": 1e-4},
        max_steps=steps,
        **{"deterministic": True, "model.autocast": "none", **keys},
    ).train()
    return weights(done)


def test_training_equals_that_of_the_engine_in_process(play, one_by_one, model_dir, tokenizer, tmp_path):
    async def in_bfloat16(client):
        client.autocast = "bfloat16"
        await client.load(WeightRef(3, "full", str(model_dir)))
        return await client.score(PROMPT)

    engines = (LocalClient(load_model(model_dir), tokenizer, autocast=name) for name in ("bfloat16", "none"))
    rounded, exact = (asyncio.run(engine.score(PROMPT)) for engine in engines)
    assert exact != rounded == play(in_bfloat16, one_by_one, api_key=KEY)
    # and the trainer's numerics are those of its next version
    own = train(model_dir, tmp_path / "own", {"name": "local", "max_rows": 1})
    served = train(model_dir, tmp_path / "served", {"name": "embedded", "url": one_by_one, "api_key": KEY})
    start = load_file(model_dir / "model.safetensors")
    assert not all(torch.equal(tensor, start[name]) for name, tensor in own.items() if name in start)
    assert_same_weights(own, served)
    rows = metrics(tmp_path / "served")
    assert all("time/verify" in row for row in rows)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_spans_across_an_update_match_their_own_weights(play, backend, tmp_path, keep_cache):
    way = WeightStore(tmp_path)

    async def scene(client):
        publisher = FilesystemPublisher(client, way)
        await publisher.publish(backend, 4)
        before = copy.deepcopy(backend.model)
        tasks = [asyncio.create_task(client.generate([*PROMPT, n], LONG)) for n in range(3)]
        await until(lambda: busy(client))
        await asyncio.sleep(0.05)
        change(backend.model, 5)
        weight_ref = await publisher.publish(backend, 5)
        assert (
            await Canary(client.vocab_size, dtype="float32", tolerance=1e-4).verify(
                backend, client, weight_ref
            )
            < 1e-4
        )
        return before, await asyncio.gather(*tasks)

    before, completions = play(scene, keep_cache=keep_cache)
    for number, completion in enumerate(completions):
        (first, old), (second, new) = completion.versions
        assert (first, old, new) == (0, 4, 5)
        assert 0 < second < 400
        if keep_cache:
            parts = [(before, second), (backend.model, 400 - second)]
            mixed = by_parts(parts, [*PROMPT, number], completion.token_ids)
            assert completion.logprobs == pytest.approx(mixed, abs=1e-4)
            continue
        by_old, by_new = (
            logprobs(model, [*PROMPT, number], completion.token_ids) for model in (before, backend.model)
        )
        assert completion.logprobs[:second] == pytest.approx(by_old[:second], abs=1e-4)
        assert completion.logprobs[second:] == pytest.approx(by_new[second:], abs=1e-4)
        assert by_old[second:] != pytest.approx(by_new[second:], abs=1e-2)


def test_a_request_waits_while_the_server_is_paused(play, model, tokenizer, backend, tmp_path):
    async def scene(client):
        await FilesystemPublisher(client, WeightStore(tmp_path)).publish(backend, 1)
        expected = await client.generate(PROMPT, LONG)
        task = asyncio.create_task(client.generate(PROMPT, LONG))
        await until(lambda: busy(client))
        await client.pause()
        await asyncio.sleep(0.3)
        held = await client.http.get("/server_info")
        await asyncio.sleep(0.2)
        assert not task.done()
        assert (await client.http.get("/server_info"))["decode_steps"] == held["decode_steps"]
        health = asyncio.create_task(client.health())
        await asyncio.sleep(0.1)
        assert not health.done()  # as of a server that generates a token for it
        await client.resume()
        await health
        assert (await task).token_ids == expected.token_ids

    play(scene)


def test_aborted_requests_return_their_tokens_so_far(play):
    async def scene(client):
        whole = await client.generate(PROMPT, LONG)
        ids = [f"1/a/{number}" for number in range(3)]
        tasks = [asyncio.create_task(client.attempt(PROMPT, LONG, name)) for name in ids]
        await until(lambda: busy(client))
        with pytest.raises(RefusedError):
            await client.sample(PROMPT, LONG, ids[0], ())
        await client.abort("of nobody")
        await client.abort(ids[0])
        first = await tasks[0]
        assert not any(task.done() for task in tasks[1:])
        await client.pause("abort")
        await client.resume()
        for found in (first, *await asyncio.gather(*tasks[1:])):
            assert found.finish_reason == "abort"
            assert 0 < len(found.token_ids) < 400
            assert found.token_ids == whole.token_ids[: len(found.token_ids)]
        assert not await busy(client)

    play(scene)


def test_a_client_that_disconnects_aborts_its_request(play):
    async def scene(client):
        tasks = [asyncio.create_task(client.generate(PROMPT, LONG)) for _ in range(3)]
        await until(lambda: busy(client))
        for task in tasks:
            task.cancel()
        begin = time.monotonic()
        await until(lambda: _idle(client))
        assert time.monotonic() - begin < 2
        streamed = later.openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none")
        async with streamed:
            stream = await streamed.completions.create(
                model=(await streamed.models.list()).data[0].id,
                prompt=PROMPT,
                temperature=0,
                max_tokens=500,
                stream=True,
            )
            await until(lambda: busy(client))
            await stream.close()
        await until(lambda: _idle(client))

    play(scene)


async def _idle(client):
    return not await busy(client)


BAD = {
    "token 320 of the vocabulary": {"input_ids": [5, 10**6]},
    "no prompt": {"input_ids": []},
    "a text for tokens": {"input_ids": "five"},
    "numbers that are not whole": {"input_ids": [5, 1.5]},
    "a prompt that fills the context": {"input_ids": [5] * 5000},
    "no tokens": {"sampling_params": {"max_new_tokens": 0}},
    "a text for a number": {"sampling_params": {"temperature": "hot"}},
    "top_p": {"sampling_params": {"top_p": 2}},
    "a typing error": {"sampling_params": {"max_tokens": 5}},
    "a penalty": {"sampling_params": {"min_p": 0.1}},
    "a field": {"txt": "a"},
    "metrics": {"log_metrics": False},
    "top_k": {"sampling_params": {"top_k": 10**30}},
    "a temperature near 0": {"sampling_params": {"temperature": 1e-300}},
    "stop strings": {"sampling_params": {"stop": ["a"] * 65}},
    "values": {"images": [0] * 7000},
    "a stream": {"stream": True},
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_requests_are_refused(play, name):
    async def scene(client):
        accepted = "min_p=0.1 is not accepted. Accepted: 0." if name == "a penalty" else None
        with pytest.raises(RefusedError, match=accepted):
            await client.http.post("/generate", {"input_ids": PROMPT, **BAD[name]})
        await client.generate(PROMPT, SAMPLED)

    play(scene)


def test_all_requests_of_a_load_find_the_server_paused(play, backend, tmp_path):
    async def scene(client):
        fleet, fetch, asked = (
            FleetClient([client], limits=FleetLimits(check_every_s=600)),
            client.http._fetch,
            [],
        )
        publisher = FilesystemPublisher(fleet, WeightStore(tmp_path))
        await publisher.publish(backend, 1)

        def recorded(method, path, *rest):
            asked.append(path)
            return fetch(method, path, *rest)

        client.http._fetch = recorded
        await publisher.publish(backend, 2)
        await fleet.disconnect()
        first, *between, last = asked
        assert (first, last) == ("/pause_generation", "/continue_generation")
        assert {"/update_weights_from_disk", "/weights_checker"} < set(between)

    play(scene)


def test_a_busy_server_answers_between_two_steps(model, tokenizer):
    """Count the steps that requests on an open connection wait for: those under way as they are sent and as they arrive."""
    client, taken, waited = LocalClient(load_model(model), tokenizer), [], []
    step = client._engine.step

    def slow():
        time.sleep(0.02)
        taken.append(1)
        return step()

    def ask(port):
        with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
            for _ in range(10):
                before = len(taken)
                connection.request("GET", "/model_info")
                connection.getresponse().read()
                waited.append(len(taken) - before)

    async def scene():
        runner = web.AppRunner(EmbeddedServer(model, tokenizer, client, "m", "m").application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", free_port("127.0.0.1"))
        await site.start()
        playing = asyncio.create_task(client.generate(PROMPT, LONG))
        await asyncio.to_thread(ask, site.port)
        assert not playing.done()
        playing.cancel()
        await runner.cleanup()

    client._engine.step = slow
    asyncio.run(scene())
    assert statistics.median(waited) <= 2


def test_a_server_continues_while_its_weights_are_read(model, tokenizer, monkeypatch):
    """Another trainer compares checksums when the one that published lets requests continue."""
    client, read = LocalClient(load_model(model), tokenizer), threading.Event()
    monkeypatch.setattr(server, "checksum", lambda model: str(read.wait(30)))

    async def scene():
        served = EmbeddedServer(model, tokenizer, client, "m", "m")
        await served._pause({})
        reading = asyncio.create_task(served._checksum({}))
        await until(lambda: asyncio.sleep(0, served._weights.locked()))
        await served._continue({})
        try:
            await asyncio.wait_for(client.generate(PROMPT, SAMPLED), 20)
        finally:
            read.set()
            await reading

    asyncio.run(scene())


def test_a_server_continues_while_a_chat_is_rendered(model, tokenizer, monkeypatch):
    read, render = threading.Event(), OpenAIEndpoints._rendered
    monkeypatch.setattr(OpenAIEndpoints, "_rendered", lambda *of: read.wait(30) and render(*of))

    async def scene():
        served = EmbeddedServer(model, tokenizer, LocalClient(load_model(model), tokenizer), "m", "m")
        said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        rendering = asyncio.create_task(served._openai.chat(said, chat))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(served._health({}), 20)
        read.set()
        assert (await rendering).prompt.token_ids

    asyncio.run(scene())


def damage(kind, directory):
    file = next(iter(directory.glob("*.safetensors")))
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    manifest = directory / "manifest.json"
    if kind == "flipped bit":
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        return
    if kind == "missing directory":
        shutil.rmtree(directory)
        return
    manifest.unlink()  # as in a directory that is not a trainer's
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
        return
    if kind == "NaN":
        tensors[name][0, 0] = float("nan")
    if kind == "missing tensor":
        del tensors[name]
    if kind == "other shape":
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "kind", ["flipped bit", "truncated", "NaN", "missing tensor", "other shape", "missing directory"]
)
def test_damaged_weights_are_refused_and_the_old_stay(play, backend, tmp_path, kind):
    async def scene(client):
        store = WeightStore(tmp_path)
        weight_ref = await FilesystemPublisher(client, store).publish(backend, 1)
        digest = await client.checksum()
        change(backend.model, 2)
        broken = FilesystemPublisher(client, store).write(backend, 2)
        backend.model.load_state_dict(load_model(weight_ref.path).state_dict())
        damage(kind, tmp_path / "v000002")
        with pytest.raises(EngineError):
            await client.load(broken)
        assert (await client.version(), await client.checksum()) == (1, digest)
        await Canary(client.vocab_size, dtype="float32", tolerance=1e-4).verify(backend, client, weight_ref)

    play(scene, visible_within_s=0.2)


def test_weights_of_another_model_are_refused(play, tokenizer, tmp_path):
    build_model(tokenizer, seed=0, hidden_size=32, num_layers=1).save_pretrained(tmp_path)

    async def scene(client):
        body = {"model_path": str(tmp_path), "weight_version": "3"}
        with pytest.raises(RefusedError):
            await client.http.post("/update_weights_from_disk", body)

    play(scene)


def test_files_are_the_only_way_to_send_weights(play, backend):
    async def scene(client):
        with pytest.raises(EngineError):
            await client.load(WeightRef(1, "lora", "/nowhere"))
        with pytest.raises(ConfigError):
            await client.sleep()

    play(scene)


def test_the_openai_package_chats_and_streams(url, model_dir):
    with later.openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert model.id == str(model_dir)
        asked = {
            "model": model.id,
            "messages": [{"role": "user", "content": "How many coins are 37 and 48?"}],
            "max_tokens": 60,
            "seed": 3,
        }
        whole = client.chat.completions.create(**asked, logprobs=True)
        text = whole.choices[0].message.content
        assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
        chunks = list(
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage == whole.usage
        stopped = client.chat.completions.create(**asked, stop=text[4:7], stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stopped)
        assert said == text[: text.find(text[4:7])]
        plain = client.completions.create(
            model=model.id, prompt="coins", temperature=0, max_tokens=40, logprobs=1
        )
        pieces = client.completions.create(
            model=model.id, prompt="coins", temperature=0, max_tokens=40, stream=True
        )
        assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text
        neutral = {"n": 1, "echo": False, "best_of": 1, "presence_penalty": 0, "logit_bias": {}}
        same = client.completions.create(
            model=model.id, prompt=["coins"], temperature=0, max_tokens=40, **neutral, extra_body={"min_p": 0}
        )
        assert same.choices[0].text == plain.choices[0].text
        assert len(plain.choices[0].logprobs.token_logprobs) == plain.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_trained_through_a_wire_is_served_through_it(url, model_dir, stream):
    """All three APIs see the same prompt, as the real packages of OpenAI and Anthropic ask."""
    asked = {"model": str(model_dir), "extra_body": {"temperature": 0}}
    hello = [{"role": "user", "content": "Hello."}]
    with later.openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked, messages=hello, max_tokens=20)
        text = whole.choices[0].message.content
        answer = client.responses.create(**asked, input="Hello.", max_output_tokens=20, stream=stream)
        answer = list(answer)[-1].response if stream else answer
        assert answer.output_text == text
        more = client.responses.create(
            **asked, input="?", previous_response_id=answer.id, max_output_tokens=2
        )
        assert more.usage.input_tokens > answer.usage.total_tokens
        assert client.models.retrieve(str(model_dir)).id == str(model_dir)
    with later.anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked, messages=hello, max_tokens=20) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked, messages=hello, max_tokens=20)
        assert answer.content[0].text == text
        count = client.messages.count_tokens(model=str(model_dir), messages=hello)
        assert count.input_tokens == answer.usage.input_tokens
        with pytest.raises(later.anthropic.BadRequestError):
            client.messages.create(**asked, messages=[], max_tokens=20)


def test_requests_of_openai_are_refused(url, one_by_one):
    said = [{"role": "user", "content": "Hello."}]
    with later.openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        for fields in ({"presence_penalty": 1.0}, {"max_tokens": 10**6}, {"temperature": -1}, {"n": 2}):
            with pytest.raises(later.openai.BadRequestError):
                client.chat.completions.create(model=name, messages=said, **fields)
        with pytest.raises(later.openai.BadRequestError):
            client.completions.create(model=name, prompt="a", suffix="b")
        with pytest.raises(later.openai.NotFoundError):
            client.chat.completions.create(model="gpt", messages=said)
    with (
        later.openai.OpenAI(base_url=f"{one_by_one}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(later.openai.AuthenticationError),
    ):
        client.models.list()


def curl(url, *headers, body="{}"):
    words = ["curl", "-s", "-d", body, *(word for header in headers for word in ("-H", header)), url]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_websites_cannot_send_requests(url, one_by_one):
    form, json_body = "Content-Type: text/plain", "Content-Type: application/json"
    evil = "Host: evil.example:8000"  # whose name may resolve to this machine
    path, refused = "/continue_generation", "Host 'evil.example:8000' is not accepted"
    assert "Content-Type must be application/json" in curl(url + path, form)
    assert refused in curl(url + path, json_body, evil)
    assert '"ok"' in curl(url + path, json_body, "Host: 10.1.2.3:8000")
    assert '"ok"' in curl(one_by_one + path, json_body, evil, f"Authorization: Bearer {KEY}")
    assert "API key is missing or wrong" in curl(one_by_one + path, json_body, "Authorization: Bearer \xff")


CHAT = b'{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 2%s}'
DEEP = b', "tools": [{"function": {"name": "f", "description": %s}}]' % (b"[" * 600 + b"]" * 600)


@pytest.mark.parametrize(("body", "answer"), [
    (CHAT % (b"a " * 4000, b""), "least 615 tokens"),
    (b'{"messages": [%s]}' % (b'{"role": "user"},' * 600), "least 600 tokens"),
    (b'{"messages": [%s{}]}' % (b"{}," * 600), "least 601 tokens"),
    (CHAT % (b"a" * 2**21, b""), "Maximum request body size"),
    (CHAT % (b"x", DEEP), "nested too deeply"),
    (CHAT % (b"x", b', "tools": {"function": {"name": "f"}}'), "Accepted: a list"),
    (CHAT % (b"\\ud800", b""), "chat.completion"),
], ids=["text", "messages", "values", "bytes", "depth", "tools", "surrogate"])  # fmt: skip
def test_a_chat_is_bounded_before_it_is_rendered(url, body, answer):
    port = int(url.rpartition(":")[2])
    with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        assert answer in connection.getresponse().read().decode()


def words(*flags):
    return server_command("embedded", flags, python=sys.executable).words[1:]


def test_unknown_options_are_refused(model_dir):
    assert words(str(model_dir), "inference.max_rows=8", "--port", "21000") == (
        "-m", "rl4llm.extensions.servers.embedded", str(model_dir), "inference.max_rows=8",
        "--host", "127.0.0.1", "--port", "21000",
    )  # fmt: skip
    for flags in (["m", "--tp=2"], ["m", "inference.max_row=8"], [], ["a", "b"]):
        with pytest.raises((ConfigError, SystemExit)):
            read_options(flags)
    with pytest.raises(ConfigError):
        words("m", "--host", "0.0.0.0")
