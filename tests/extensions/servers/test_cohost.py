"""One device for engine and trainer: the order in which they give it to each other, and what is refused out of order."""

import asyncio

import pytest

from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EngineError, UnreachableError, WeightsError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.server import Sampled, ServerClient
from rl4llm.extensions.servers.fleet.cohosted import CohostedFleet, DeviceState
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.extensions.servers.sync.wrappers import CohostPublisher


class Quiet(ServerClient):
    """A server in this process, which samples one token."""

    held = -1

    async def sample(self, prompt_ids, params, request_id, images):
        return Sampled([5], [-1.0], "length", ((0, self.held),))

    async def score(self, token_ids):
        return [-1.0] * (len(token_ids) - 1)

    async def version(self):
        return self.held

    async def health(self):
        return {}

    async def pause(self):
        pass

    async def resume(self):
        pass


@pytest.fixture
def parts(model, tokenizer, tmp_path):
    """Return (log of calls, the engine on a shared device, its publisher, the trainer's backend)."""
    calls = []

    class Engine(Quiet):
        async def sleep(self, tags=("weights", "kv_cache")):
            calls.append(("engine sleeps", *tags))

        async def wake(self, tags=("weights", "kv_cache")):
            calls.append(("engine wakes", *tags))

        async def load_weights(self, weight_ref):
            assert (tmp_path / f"v{weight_ref.version:06d}" / "manifest.json").exists()
            calls.append(("engine loads", weight_ref.version))
            self.held = weight_ref.version

    class Backend(TorchBackend):
        def onload(self):
            calls.append(("trainer takes the device",))

        def offload(self):
            calls.append(("trainer leaves the device",))

    engine = Engine("http://127.0.0.1:9", tokenizer, vocab_size=len(tokenizer), context_length=64)
    client = CohostedFleet([engine])
    publisher = CohostPublisher(client, FilesystemPublisher(client, WeightStore(tmp_path)))
    return calls, client, publisher, Backend(load_model(model), lr=1e-3)


HANDOVER = [
    ("engine sleeps", "weights", "kv_cache"),
    ("trainer takes the device",),
    ("trainer leaves the device",),
    ("engine wakes", "weights"),
]


def test_every_step_shares_the_device_in_one_order(parts):
    calls, client, publisher, backend = parts

    async def steps():
        await publisher.publish(backend, 0)
        await client.generate([5], SamplingParams())
        await publisher.lend_device(backend)  # the update begins
        await publisher.lend_device(backend)
        await publisher.publish(backend, 1)
        await client.generate([5], SamplingParams())

    asyncio.run(steps())
    expected = [[*HANDOVER, ("engine loads", version), ("engine wakes", "kv_cache")] for version in (0, 1)]
    assert calls == expected[0] + expected[1]


class Guest:
    """Another model on the trainer's device."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def onload(self):
        self.calls.append((f"{self.name} takes the device",))

    def offload(self):
        self.calls.append((f"{self.name} leaves the device",))


def test_critic_and_reference_take_and_leave_the_device_too(parts):
    calls, client, publisher, backend = parts
    publisher = CohostPublisher(client, publisher._files, [Guest(calls, "critic"), Guest(calls, "reference")])
    asyncio.run(publisher.publish(backend, 0))
    assert calls == [
        HANDOVER[0],
        *[(f"{name} takes the device",) for name in ("trainer", "critic", "reference")],
        *[(f"{name} leaves the device",) for name in ("trainer", "critic", "reference")],
        HANDOVER[3],
        ("engine loads", 0),
        ("engine wakes", "kv_cache"),
    ]
    calls.clear()
    publisher.take_device(backend)  # what the other ranks do
    publisher.follow(backend)
    names = ("trainer", "critic", "reference")
    assert calls == [(f"{name} {what} the device",) for what in ("takes", "leaves") for name in names]


def test_no_model_takes_the_device_before_every_server_sleeps(tokenizer):
    asleep, calls = set(), {"late": 0}

    class Engine(Quiet):
        async def version(self):
            calls["late"] += "9002" in self.base_url
            if "9002" in self.base_url and calls["late"] < 3:
                raise UnreachableError("still starting")
            return self.held

        async def health(self):
            await self.version()
            return {}

        async def sleep(self, tags=("weights", "kv_cache")):
            asleep.add(self.base_url)

        wake = load_weights = sleep

    urls = [f"http://127.0.0.1:{port}" for port in (9001, 9002)]
    engines = [Engine(url, tokenizer, vocab_size=len(tokenizer), context_length=64) for url in urls]

    async def connects(deadline_s):
        pass

    for engine in engines:
        engine.http.knock = connects
    fleet = CohostedFleet(engines)

    async def work():
        try:
            await fleet.sleep()
        finally:
            await fleet.disconnect()

    asyncio.run(work())
    assert asleep == set(urls)
    assert not fleet.awake


def test_nothing_is_generated_between_waking_and_loading(parts):
    _, client, _, _ = parts
    params = SamplingParams()

    async def refused():
        for question in (client.generate([5], params), client.score([5, 6])):
            with pytest.raises(EngineError):
                await question

    async def walk():
        await client.generate([5], params)
        await client.sleep()
        await refused()
        with pytest.raises(EngineError):
            await client.load(WeightRef(1, "full", "/nowhere"))
        with pytest.raises(EngineError):
            await client.wake(("kv_cache",))
        await client.wake(("weights",))
        await refused()
        with pytest.raises(EngineError):
            await client.wake(("kv_cache",))
        with pytest.raises(EngineError):
            await client.sleep()

    asyncio.run(walk())
    assert client.state is DeviceState.EMPTY


def test_a_load_that_fails_leaves_an_engine_that_does_not_answer(parts, monkeypatch):
    _, client, publisher, backend = parts

    async def fail(weight_ref):
        raise EngineError("the server died")

    monkeypatch.setattr(client.engines()[0], "load_weights", fail)

    async def walk():
        with pytest.raises(EngineError):
            await publisher.publish(backend, 3)
        with pytest.raises(EngineError):
            await client.generate([5], SamplingParams())

    asyncio.run(walk())


def test_a_closed_publisher_lets_its_directory_go(parts, tmp_path):
    _, _, publisher, backend = parts
    asyncio.run(publisher.publish(backend, 0))
    with pytest.raises(WeightsError):
        WeightStore(tmp_path).write(1, backend.weight_specs(), backend.weights())
    asyncio.run(publisher.close())
    WeightStore(tmp_path).write(1, backend.weight_specs(), backend.weights())
