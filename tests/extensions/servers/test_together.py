"""All servers of a fleet take weights from one process group, and each from its own if that fails."""

import asyncio
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fault_server import small_model, status
from test_tensor import TensorServer, proven

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EngineError
from rl4llm.core.types import WeightRef
from rl4llm.extensions.servers.clients import sglang_tensors, together
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.clients.together import Broadcast
from rl4llm.extensions.servers.fleet.fleet import FleetClient
from rl4llm.extensions.servers.fleet.member import FleetLimits
from rl4llm.extensions.servers.sync.tensor import TensorPublisher
from rl4llm.runtime.transport import Retry

WAIT = timedelta(seconds=20)


class GlooServer(TensorServer):
    """Joins groups over gloo and takes tensors from them, with the store's keys where torch's own helper has them."""

    joined, wait = (), WAIT

    async def start(self):
        self.joined, self.worlds, self.busy = {}, [], asyncio.Lock()
        await super().start()

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
            async with self.busy:
                return await asyncio.to_thread(join)

        self.joined[name] = await asyncio.shield(asyncio.create_task(joining()))
        return await super()._init_weights_update_group(body)

    async def _destroy_weights_update_group(self, body):
        self.joined.pop(body["group_name"], None)
        return await super()._destroy_weights_update_group(body)

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

        monkeypatch.setattr(sglang_tensors, "BUCKET_BYTES", 20_000)
        return asyncio.run(main())

    return run


def counted(backend):
    """Count how often the weights are iterated."""
    weights, counts = backend.weights, []
    backend.weights = lambda: counts.append(1) or weights()
    return counts


def test_a_broadcast_waits_for_the_gpu_of_its_tensors(monkeypatch):
    waited, sent = [], SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    group = Broadcast("127.0.0.1", 2, "group", "nccl")
    group._group = SimpleNamespace(broadcast=lambda tensors, options: sent)
    group.send([torch.zeros(1, device="meta"), torch.zeros(1)])
    assert waited == [torch.device("meta")]


def test_two_servers_take_each_tensor_from_one_group(play):
    async def story(servers, fleet, backend):
        counts = counted(backend)
        for version in (1, 2):
            weight_ref = await TensorPublisher(fleet, "distributed").publish(backend, version)
            assert await proven(fleet, backend, weight_ref)
        assert sorted(world for server in servers for world in server.worlds) == [(3, 1), (3, 2)]
        assert len(counts) == 4  # to check them, and to send them, of two versions
        assert len({name for server in servers for name in server.groups}) == 1

    play(story)


def test_a_server_that_dies_leaves_the_others_with_the_weights(play):
    async def story(servers, fleet, backend):
        for server in servers:
            server.wait = timedelta(seconds=6)  # as long as the other one may keep a core busy
        await TensorPublisher(fleet, "distributed").publish(backend, 1)

        async def die(server, request, answer):
            server.kill()
            server.joined.clear()  # a process that dies closes its sockets
            await asyncio.Event().wait()

        servers[1].next("/update_weights_from_distributed", die)
        weight_ref = await TensorPublisher(fleet, "distributed").publish(backend, 2)
        assert [str(engine) for engine in fleet.engines()] == [str(fleet._servers[0].client)]
        assert await proven(fleet, backend, weight_ref)
        assert servers[0].worlds[-1] == (2, 1)  # its own group
        await servers[1].start()
        while len(fleet.engines()) < 2:
            await asyncio.sleep(0.05)
        assert servers[1].weight_version == "2" and servers[1].worlds[-1] == (2, 1)
        await TensorPublisher(fleet, "distributed").publish(backend, 3)
        assert [server.worlds[-1] for server in sorted(servers, key=lambda one: one.url)] == [(3, 1), (3, 2)]

    play(story)


def test_a_server_that_refuses_to_join_holds_up_nobody(play, caplog):
    async def story(servers, fleet, backend):
        servers[0].next("/init_weights_update_group", *[status(400, text="no route")] * 2)
        begin = time.monotonic()
        weight_ref = await TensorPublisher(fleet, "distributed").publish(backend, 1)
        # the other one does not wait for its timeout
        assert time.monotonic() - begin < WAIT.total_seconds() / 2
        assert await proven(fleet, backend, weight_ref)
        assert servers[1].weight_version == "1"
        [line] = [record.getMessage() for record in caplog.records if "its own" in record.getMessage()]
        assert "each gets its own" in line and servers[0].url in line and "no route" in line

    play(story)


def test_a_group_that_cannot_be_formed_is_an_error(play, monkeypatch):
    async def story(servers, fleet, backend):
        def differs(url):
            raise EngineError("the trainer has NCCL 2.29.7")

        async def on_a_gpu(body):
            return {"version": "0.5.23", "tp_size": 1, "device": "cuda"}

        monkeypatch.setattr(together, "check_same_nccl", differs)
        for server in servers:
            server._server_info = on_a_gpu
        with pytest.raises(EngineError, match=r"the trainer has NCCL 2\.29\.7"):
            await TensorPublisher(fleet, "distributed").publish(backend, 1)
        assert not any(server.worlds for server in servers)

    play(story)
