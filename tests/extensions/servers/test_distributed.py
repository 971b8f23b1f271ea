"""Weights through process groups: whole or not at all, and from one group for all servers of a fleet."""

import asyncio
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from fault_server import FaultServer, reset, small_model, status

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EngineError, EnginesDownError, WeightsError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import TensorSpec, WeightRef
from rl4llm.extensions.servers.clients import together
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.clients.together import Broadcast
from rl4llm.extensions.servers.fleet.fleet import FleetClient
from rl4llm.extensions.servers.fleet.member import FleetLimits
from rl4llm.extensions.servers.sync.distributed import BroadcastPublisher, over_broadcast
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.extensions.servers.sync.wrappers import FallbackPublisher
from rl4llm.runtime import devices
from rl4llm.runtime.transport import Retry
from rl4llm.sync.verify import Canary

WAIT = timedelta(seconds=20)
PARAMS = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)


class GlooServer(FaultServer):
    """Joins groups over gloo and takes tensors from them, with the store's keys where torch's own helper has them.

    As in SGLang, an update begins once and ends once.
    """

    joined, wait = (), WAIT

    async def start(self):
        self.open, self.groups = False, set()
        self.joined, self.worlds, self.joins = {}, [], asyncio.Lock()
        await super().start()

    async def _begin_weight_update(self, body):
        return self._set_open(True)

    async def _end_weight_update(self, body):
        return self._set_open(False)

    def _set_open(self, is_open):
        if self.open == is_open:
            raise web.HTTPBadRequest(text="a weight-update session is already open, or none is")
        self.open = is_open
        return {"success": True, "message": "Success"}

    async def _server_info(self, body):
        return {"version": "0.5.23", "tp_size": 1, "device": "cpu"}

    async def _init_weights_update_group(self, body):
        name, world = body["group_name"], body["world_size"]
        self.worlds.append((world, body["rank_offset"]))

        def join():
            store = dist.TCPStore(body["master_address"], body["master_port"], world, timeout=self.wait)
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            return dist.ProcessGroupGloo(store, body["rank_offset"], world, self.wait)

        async def joining():
            # a server does nothing else while it joins, even if no client waits for its answer
            async with self.joins:
                return await asyncio.to_thread(join)

        self.joined[name] = await asyncio.shield(asyncio.create_task(joining()))
        self.groups.add(name)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def _destroy_weights_update_group(self, body):
        self.joined.pop(body["group_name"], None)
        self.groups.discard(body["group_name"])
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def _update_weights_from_distributed(self, body):
        assert self.open
        group, options = self.joined[body["group_name"]], dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            await asyncio.to_thread(lambda tensor=tensor: group.broadcast([tensor], options).wait())
            self.model.load_state_dict({name: tensor}, strict=False)
        if body["weight_version"] is not None:
            self.weight_version = body["weight_version"]
            await self.engine.load(WeightRef(int(self.weight_version)))
        return {"success": True, "message": "Succeeded to update parameter online."}


@pytest.fixture
def play(tokenizer, monkeypatch):
    """Run `story(servers, fleet, backend)` with a number of servers."""

    def run(story, number=2):
        async def main():
            servers = [GlooServer(small_model(tokenizer), tokenizer) for _ in range(number)]
            for server in servers:
                await server.start()
            options = {"vocab_size": len(tokenizer), "context_length": 128}
            clients = [SGLangClient(server.url, tokenizer, **options) for server in servers]
            for client in clients:
                client.retry = Retry(2, first_wait_s=0.001)
            limits = FleetLimits(rest=Retry(first_wait_s=0.05, longest_wait_s=0.1), check_every_s=0.1)
            fleet = FleetClient(clients, limits=limits)
            try:
                async with asyncio.timeout(90):
                    await story(servers, fleet, TorchBackend(small_model(tokenizer, seed=1), lr=1e-3))
            finally:
                await fleet.close()
                assert all(client.http._session is None for client in clients)  # none was opened again
                assert not any(server.groups for server in servers if server.running)
                for server in servers:
                    await server.stop()

        monkeypatch.setattr(together, "BUCKET_BYTES", 20_000)
        return asyncio.run(main())

    return run


def counted(backend):
    """Count how often the weights are iterated."""
    weights, counts = backend.weights, []
    backend.weights = lambda: counts.append(1) or weights()
    return counts


def test_a_broadcast_waits_for_the_gpu_of_its_tensors(monkeypatch):
    waited, sent = [], SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(devices, "call", lambda device, name, *args: waited.append((name, device)))
    group = Broadcast("127.0.0.1", 2, "group", "nccl")
    group._group = SimpleNamespace(broadcast=lambda tensors, options: sent)
    group.send([torch.zeros(1, device="meta"), torch.zeros(1)])
    assert waited == [("synchronize", torch.device("meta"))]


def test_two_servers_take_each_tensor_from_one_group(play):
    async def story(servers, fleet, backend):
        counts = counted(backend)
        for version in (1, 2):
            weight_ref = await BroadcastPublisher(fleet).publish(backend, version)
            assert await proven(fleet, backend, weight_ref)
        assert sorted(world for server in servers for world in server.worlds) == [(3, 1), (3, 2)]
        assert len(counts) == 4  # to check them, and to send them, of two versions
        assert len({name for server in servers for name in server.groups}) == 1

    play(story)


def test_a_server_that_dies_leaves_the_others_with_the_weights(play):
    async def story(servers, fleet, backend):
        for server in servers:
            server.wait = timedelta(seconds=6)  # as long as the other one may keep a core busy
        await BroadcastPublisher(fleet).publish(backend, 1)

        async def die(server, request, answer):
            server.kill()
            server.joined.clear()  # a process that dies closes its sockets
            await asyncio.Event().wait()

        servers[1].next("/update_weights_from_distributed", die)
        weight_ref = await BroadcastPublisher(fleet).publish(backend, 2)
        assert [str(engine) for engine in fleet.engines()] == [str(fleet._servers[0].client)]
        assert await proven(fleet, backend, weight_ref)
        assert servers[0].worlds[-1] == (2, 1)  # its own group
        await servers[1].start()
        while len(fleet.engines()) < 2:
            await asyncio.sleep(0.05)
        assert servers[1].weight_version == "2" and servers[1].worlds[-1] == (2, 1)
        await BroadcastPublisher(fleet).publish(backend, 3)
        assert [server.worlds[-1] for server in sorted(servers, key=lambda one: one.url)] == [(3, 1), (3, 2)]

    play(story)


def test_a_server_that_refuses_to_join_holds_up_nobody(play, caplog):
    async def story(servers, fleet, backend):
        servers[0].next("/init_weights_update_group", *[status(400, text="no route")] * 2)
        begin = time.monotonic()
        weight_ref = await BroadcastPublisher(fleet).publish(backend, 1)
        # the other one does not wait for its timeout
        assert time.monotonic() - begin < WAIT.total_seconds() / 2
        assert await proven(fleet, backend, weight_ref)
        assert servers[1].weight_version == "1"
        [line] = [record.getMessage() for record in caplog.records if "its own" in record.getMessage()]
        assert "each gets its own" in line and servers[0].url in line and "no route" in line

    play(story)


async def proven(client, backend, weight_ref):
    return await Canary(client.vocab_size, dtype="float32").verify(backend, client, weight_ref) < 1e-4


def only(fleet):
    return fleet._servers[0].client


def add(backend, value):
    with torch.no_grad():
        next(backend.model.parameters()).add_(value)


def noted(server):
    """Return a list that gets the body of each update."""
    take, bodies = server._update_weights_from_distributed, []

    def note(body):
        bodies.append(body)
        return take(body)

    server._update_weights_from_distributed = note
    return bodies


def test_the_version_comes_with_the_last_tensor(play, tmp_path):
    async def story(servers, fleet, backend):
        bodies = noted(servers[0])
        store = WeightStore(tmp_path, dtype=torch.bfloat16)
        await over_broadcast(fleet, lambda: store, None).publish(backend, 7)
        assert [body["weight_version"] for body in bodies] == [None] * (len(bodies) - 1) + ["7"] != ["7"]
        sent = {
            (len(shape) > 1, dtype)
            for b in bodies
            for shape, dtype in zip(b["shapes"], b["dtypes"], strict=True)
        }
        assert sent == {(True, "bfloat16"), (False, "float32")}  # as in files
        assert (servers[0].open, servers[0].paused) == (False, False)
        digest = await only(fleet).checksum()
        await FilesystemPublisher(fleet, store).publish(backend, 8)
        assert await only(fleet).checksum() == digest

    play(story, 1)


def without_the_last(backend):
    specs = backend.weight_specs()
    backend.weight_specs = lambda: specs[:-1]


def with_one_more(backend):
    specs = backend.weight_specs()
    backend.weight_specs = lambda: [*specs, TensorSpec("more", (1,), torch.float32)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda backend: add(backend, float("nan")),
        lambda backend: add(backend, float("inf")),
        lambda backend: add(backend, 1e30),  # too large for the dtype that is sent
        without_the_last,
        with_one_more,
    ],
)
def test_damaged_weights_reach_no_engine_and_take_no_fallback(play, tmp_path, spoil):
    async def story(servers, fleet, backend):
        calls, lines = dict(servers[0].calls), []
        files = FilesystemPublisher(fleet, WeightStore(tmp_path))
        spoil(backend)
        with pytest.raises(WeightsError):
            await FallbackPublisher(BroadcastPublisher(fleet, torch.float16), files, lines.append).publish(
                backend, 2
            )
        assert servers[0].calls == calls and not lines

    play(story, 1)


def test_what_a_trainer_that_died_left_open_is_closed_first(play):
    async def story(servers, fleet, backend):
        await only(fleet).http.post("/begin_weight_update", {})
        weight_ref = await BroadcastPublisher(fleet).publish(backend, 3)
        assert not servers[0].open and await proven(fleet, backend, weight_ref)

    play(story, 1)


FAULTS = {
    "begin refused": ("/begin_weight_update", [status(400, text="busy")] * 2),
    "begin lost": ("/begin_weight_update", [reset(after=True)]),
    "end lost": ("/end_weight_update", [reset(after=True)]),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_failed_update_is_closed_and_the_next_one_succeeds(play, name):
    async def story(servers, fleet, backend):
        server, client = servers[0], only(fleet)
        way = BroadcastPublisher(client)
        await way.publish(backend, 1)
        path, faults = FAULTS[name]
        server.next(path, *faults)
        add(backend, 0.1)
        if name == "end lost":  # all tensors arrived, and so did the version: what reads back decides
            await way.publish(backend, 2)
        else:
            with pytest.raises(EngineError):
                await way.publish(backend, 2)
            assert await client.version() == 1
        assert (server.open, server.paused) == (False, False)
        assert await proven(client, backend, await way.publish(backend, 2))

    play(story, 1)


def test_a_cancelled_update_leaves_nothing_open(play):
    async def story(servers, fleet, backend):
        async def hold(body):
            await asyncio.Event().wait()

        servers[0]._update_weights_from_distributed = hold
        servers[0].wait = timedelta(seconds=3)
        update = asyncio.create_task(BroadcastPublisher(only(fleet)).publish(backend, 2))
        while not servers[0].calls["/update_weights_from_distributed"]:
            await asyncio.sleep(0.01)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert (servers[0].open, servers[0].paused) == (False, False)

    play(story, 1)


def test_a_failed_process_group_is_left_at_both_ends(play):
    async def story(servers, fleet, backend):
        server, client = servers[0], only(fleet)
        server.next("/init_weights_update_group", status(400, text="no route"), reset())
        for number in range(2):
            with pytest.raises(EngineError):
                await BroadcastPublisher(client).publish(backend, 2)
            assert not client.together.groups and not server.groups and not server.paused
            assert server.calls["/destroy_weights_update_group"] == number + 1
        assert (await client.generate([5, 6], PARAMS)).version == -1

    began = time.monotonic()
    play(story, 1)
    assert time.monotonic() - began < 20  # the call that waits for the server has 120 s


def test_the_fallback_is_reported_and_holds_for_one_version(play, tmp_path):
    async def story(servers, fleet, backend):
        lines, client = [], only(fleet)
        way = FallbackPublisher(
            BroadcastPublisher(client), FilesystemPublisher(client, WeightStore(tmp_path)), lines.append
        )
        servers[0].next("/init_weights_update_group", status(400, text="out of memory"))
        weight_ref = await way.publish(backend, 1)
        assert weight_ref.kind == "full" and await proven(client, backend, weight_ref)
        assert len(lines) == way.taken == 1 and "out of memory" in lines[0]
        assert (await way.publish(backend, 2)).kind == "distributed" and way.taken == 1

        async def down(backend, version):
            raise EnginesDownError("all servers are down")

        way._publisher.publish = down
        with pytest.raises(EnginesDownError):
            await way.publish(backend, 3)
        assert way.taken == 1
        await way.close()

    play(story, 1)
