"""Weights in requests and through process groups: whole or not at all, and what a failure leaves open is closed."""

import asyncio
import base64
import inspect
import pickle
import time

import pytest
import torch
from aiohttp import web
from fault_server import FaultServer, reset, small_model, status

from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EngineError, EnginesDownError, WeightsError
from rl4llm.core.types import SamplingParams, TensorSpec, WeightRef
from rl4llm.extensions.servers.clients import neighbour, sglang_tensors
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.extensions.servers.sync.tensor import TensorPublisher, over_requests
from rl4llm.extensions.servers.sync.wrappers import FallbackPublisher
from rl4llm.runtime.transport import Retry
from rl4llm.sync.verify import Canary

PARAMS = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)


class TensorServer(FaultServer):
    """Takes tensors in requests as SGLang does: between two others, and never twice begun."""

    open = False

    async def start(self):
        self.open = False
        self.groups = set()
        await super().start()

    async def _begin_weight_update(self, body):
        if self.open:
            raise web.HTTPBadRequest(
                text="a weight-update session is already open; call end_weight_update() first"
            )
        self.open = True
        return {"success": True, "message": "Success"}

    async def _end_weight_update(self, body):
        if not self.open:
            raise web.HTTPBadRequest(text="no weight-update session is open")
        self.open = False
        return {"success": True, "message": "Success"}

    async def _update_weights_from_tensor(self, body):
        if not self.open:
            raise web.HTTPBadRequest(text="no weight-update session is open")
        [payload] = body["serialized_named_tensors"]
        self.model.load_state_dict(dict(pickle.loads(base64.b64decode(payload))), strict=False)
        if body["weight_version"] is not None:
            self.weight_version = body["weight_version"]
            await self.engine.load(WeightRef(int(self.weight_version)))
        return {"success": True, "message": "Succeeded to update parameter online."}

    async def _init_weights_update_group(self, body):
        self.groups.add(body["group_name"])
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def _destroy_weights_update_group(self, body):
        self.groups.discard(body["group_name"])
        return {"success": True, "message": "Succeeded to destroy custom process group."}


@pytest.fixture
def backend(tokenizer):
    return TorchBackend(small_model(tokenizer, seed=1), lr=1e-3)


@pytest.fixture
def play(tokenizer, monkeypatch):
    """Run `story(server, client)`; each tensor goes in a separate request."""

    def run(story):
        async def main():
            server = TensorServer(small_model(tokenizer), tokenizer)
            await server.start()
            client = SGLangClient(server.url, tokenizer, vocab_size=len(tokenizer), context_length=128)
            client.retry = Retry(2, first_wait_s=0.001)
            try:
                async with asyncio.timeout(30):
                    return await story(server, client)
            finally:
                await client.close()
                await server.stop()

        monkeypatch.setattr(sglang_tensors, "BUCKET_BYTES", 1)
        return asyncio.run(main())

    return run


async def proven(client, backend, weight_ref):
    return await Canary(client.vocab_size, dtype="float32").verify(backend, client, weight_ref) < 1e-4


def spoil(backend, value=float("nan")):
    """Make the last number of the last tensor not finite."""
    with torch.no_grad():
        list(backend.model.parameters())[-1].view(-1)[-1] = value


def test_the_version_comes_with_the_last_tensor(play, backend):
    async def story(server, client):
        sent = []
        take = server._update_weights_from_tensor

        async def note(body):
            sent.append(body["weight_version"])
            return await take(body)

        server._update_weights_from_tensor = note
        weight_ref = await TensorPublisher(client, "tensor").publish(backend, 7)
        assert sent == [None] * (len(backend.weight_specs()) - 1) + ["7"]
        assert not server.open
        assert not server.paused
        assert await proven(client, backend, weight_ref)

    play(story)


def test_matrices_are_sent_in_the_dtype_of_the_files(play, backend, tmp_path):
    async def story(server, client):
        sent = {}
        take = server._update_weights_from_tensor

        async def note(body):
            [payload] = body["serialized_named_tensors"]
            sent.update(pickle.loads(base64.b64decode(payload)))
            return await take(body)

        server._update_weights_from_tensor = note
        store = WeightStore(tmp_path, dtype=torch.bfloat16)
        await over_requests(client, lambda: store, None).publish(backend, 1)
        kinds = {(tensor.ndim > 1, tensor.dtype) for tensor in sent.values()}
        assert kinds == {(True, torch.bfloat16), (False, torch.float32)}
        digest = await client.checksum()
        await FilesystemPublisher(client, store).publish(backend, 2)
        assert await client.checksum() == digest

    play(story)


def test_weights_too_large_for_the_dtype_reach_no_engine(play, backend):
    async def story(server, client):
        with torch.no_grad():
            next(backend.model.parameters())[0, 0] = 1e30
        with pytest.raises(WeightsError, match="holds 1 values that are not finite"):
            await TensorPublisher(client, "tensor", torch.float16).publish(backend, 1)
        assert not server.calls["/update_weights_from_tensor"]

    play(story)


@pytest.mark.parametrize("kind", ["tensor", "distributed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_reach_no_engine(play, backend, kind, value):
    async def story(server, client):
        await TensorPublisher(client, "tensor").publish(backend, 1)
        before, calls = await client.checksum(), dict(server.calls)
        with torch.no_grad():
            next(backend.model.parameters()).add_(1.0)
        spoil(backend, value)
        with pytest.raises(WeightsError, match="holds 1 values that are not finite"):
            await TensorPublisher(client, kind).publish(backend, 2)
        assert server.calls == calls
        assert (await client.version(), await client.checksum()) == (1, before)
        assert (await client.generate([5, 6], PARAMS)).version == 1

    play(story)


def test_tensors_other_than_the_models_own_reach_no_engine(play, backend):
    async def story(server, client):
        calls = dict(server.calls)
        specs = backend.weight_specs()
        for wrong in (specs[:-1], [*specs, TensorSpec("more", (1,), torch.float32)], [*specs[:-1], specs[0]]):
            backend.weight_specs = lambda wrong=wrong: wrong
            with pytest.raises(WeightsError, match="The weights"):
                await TensorPublisher(client, "tensor").publish(backend, 1)
        assert server.calls == calls

    play(story)


def test_what_a_trainer_that_died_left_open_is_closed_first(play, backend):
    async def story(server, client):
        await client.http.post("/begin_weight_update", {})
        weight_ref = await TensorPublisher(client, "tensor").publish(backend, 3)
        assert not server.open
        assert await proven(client, backend, weight_ref)

    play(story)


FAULTS = {
    "begin refused": ("/begin_weight_update", [status(400, text="busy")] * 2),
    "begin lost": ("/begin_weight_update", [reset(after=True)]),
    "tensor refused": ("/update_weights_from_tensor", [None, None, status(400, text="no such tensor")]),
    "tensor lost": ("/update_weights_from_tensor", [None, reset()]),
    "end lost": ("/end_weight_update", [reset(after=True)]),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_failed_update_is_closed_and_the_next_one_succeeds(play, backend, name):
    async def story(server, client):
        way = TensorPublisher(client, "tensor")
        await way.publish(backend, 1)
        path, faults = FAULTS[name]
        server.next(path, *faults)
        with torch.no_grad():
            next(backend.model.parameters()).add_(0.1)
        if name == "end lost":  # all of them arrived, and so did the version: what reads back decides
            await way.publish(backend, 2)
        else:
            with pytest.raises(EngineError, match=f"{path} (answered|failed)"):
                await way.publish(backend, 2)
            assert await client.version() == 1
        assert (server.open, server.paused) == (False, False)
        assert await proven(client, backend, await way.publish(backend, 2))

    play(story)


def test_a_cancelled_update_leaves_nothing_open(play, backend):
    async def story(server, client):
        async def hold(body):
            await asyncio.Event().wait()

        server._update_weights_from_tensor = hold
        update = asyncio.create_task(TensorPublisher(client, "tensor").publish(backend, 2))
        while not server.calls["/update_weights_from_tensor"]:
            await asyncio.sleep(0.01)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert (server.open, server.paused) == (False, False)

    play(story)


def test_a_tensor_that_is_part_of_a_larger_one_is_sent_alone(play, backend):
    whole = torch.randn(1000, 100)
    payload, second = sglang_tensors.pickled(["a", "b"], [whole[3], whole[:, 3]], 2)
    assert payload == second
    assert len(payload) < 10_000
    (_, row), (_, column) = pickle.loads(base64.b64decode(payload))
    assert torch.equal(row, whole[3])
    assert torch.equal(column, whole[:, 3])


def test_a_failed_process_group_is_left_at_both_ends(play, backend):
    began = time.monotonic()

    async def story(server, client):
        server.next("/init_weights_update_group", status(400, text="no route"), reset(after=True))
        names = set()
        for _ in range(2):
            with pytest.raises(
                EngineError, match=r"could not be sent weights .* inference.trainer_host='127.0.0.1'"
            ):
                await TensorPublisher(client, "distributed").publish(backend, 2)
            assert not client.together.groups
            assert not server.groups
            names.add(str(server.calls["/destroy_weights_update_group"]))
        assert names == {"1", "2"}
        assert not server.paused
        assert (await client.generate([5, 6], PARAMS)).version == -1

    play(story)
    assert time.monotonic() - began < 20  # the call that waits for the server has 120 s


def test_the_fallback_is_reported_and_holds_for_one_version(play, backend, tmp_path):
    async def story(server, client):
        lines = []
        way = FallbackPublisher(
            TensorPublisher(client, "tensor"),
            FilesystemPublisher(client, WeightStore(tmp_path)),
            lines.append,
        )
        server.next("/update_weights_from_tensor", None, status(400, text="out of memory"))
        weight_ref = await way.publish(backend, 1)
        assert weight_ref.kind == "full"
        assert await proven(client, backend, weight_ref)
        assert len(lines) == way.taken == 1
        assert "Version 1 was published with sync.fallback" in lines[0]
        assert "out of memory" in lines[0]
        assert (await way.publish(backend, 2)).kind == "tensor"
        assert way.taken == 1
        await way.close()

    play(story)


def test_faulty_weights_and_absent_servers_take_no_fallback(play, backend, tmp_path):
    async def story(server, client):
        lines = []
        files = FilesystemPublisher(client, WeightStore(tmp_path))
        spoil(backend)
        with pytest.raises(WeightsError):
            await FallbackPublisher(TensorPublisher(client, "tensor"), files, lines.append).publish(
                backend, 1
            )

        class Down(TensorPublisher):
            async def publish(self, backend, version):
                raise EnginesDownError("all servers are down")

        with pytest.raises(EnginesDownError):
            await FallbackPublisher(Down(client, "tensor"), files, lines.append).publish(backend, 1)
        assert not lines
        await files.close()

    play(story)


def test_each_rank_gets_separate_handles_by_uuid(monkeypatch):
    made = []

    class Shared(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(sglang_tensors, "_alone", lambda tensor: tensor)
    monkeypatch.setattr(
        sglang_tensors, "_handles", lambda pairs: made.append(pairs) or str(len(made)).encode()
    )
    tensors = [torch.zeros(2).as_subclass(Shared)]
    payloads = sglang_tensors.pickled(["a"], tensors, 3)
    assert [base64.b64decode(payload) for payload in payloads] == [b"1", b"2", b"3"]
    rebuild, arguments = sglang_tensors.by_uuid((print, tuple(range(15))), "8932f937")
    assert (rebuild, arguments) == (print, (*range(6), "8932f937", *range(7, 15)))


def rebuilt(*arguments):
    return arguments


def test_a_handle_is_pickled_with_the_uuid_of_its_gpu(monkeypatch):
    properties = type("Properties", (), {"uuid": "8932f937"})
    monkeypatch.setattr(sglang_tensors, "reduce_tensor", lambda tensor: (rebuilt, tuple(range(15))))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    [(name, arguments)] = pickle.loads(sglang_tensors._handles([("a", torch.zeros(2))]))
    assert (name, arguments) == ("a", (*range(6), "8932f937", *range(7, 15)))


def test_the_device_is_where_torch_has_it():
    """`by_uuid` replaces an argument by its place, which is the name of it in the function that SGLang calls with them."""
    names = list(inspect.signature(torch.multiprocessing.reductions.rebuild_cuda_tensor).parameters)
    assert names[sglang_tensors.DEVICE] == "storage_device"


OTHER = "http://127.0.0.1:30000"


@pytest.fixture
def neighbours(monkeypatch):
    """Set what this process and the server's see, and the version of NCCL that each has."""

    class Process:
        def __init__(self, environ):
            self._environ = environ

        def environ(self):
            return self._environ

    def arrange(ours, theirs, uuid="8932f937"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if ours is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
        environ = {"HOME": "/"} if theirs is None else {"CUDA_VISIBLE_DEVICES": theirs}
        monkeypatch.setattr(neighbour, "_processes", lambda url: iter([Process(environ)]))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: type("Properties", (), {"uuid": uuid})
        )

    return arrange


@pytest.mark.parametrize(
    ("ours", "theirs", "index", "shared"),
    [
        ("4", "5", 0, False),
        ("4,5", "5", 1, True),
        ("4,5", "4,5", 0, True),
        (None, "0", 0, True),
        (None, "1", 0, False),
        (None, None, 0, True),
        ("4", "GPU-8932f9", 0, True),
        ("4", "GPU-77", 0, False),
        ("GPU-8932f937", "GPU-8932", 0, True),
        ("GPU-8932f937", "5", 0, True),  # which cannot be compared
        ("4", "MIG-94f1", 0, True),
        ("4", "", 0, False),
    ],
)
def test_handles_of_a_gpu_go_only_to_servers_that_see_it(neighbours, ours, theirs, index, shared):
    neighbours(ours, theirs)
    device = torch.device("cuda", index)
    if shared:
        neighbour.check_gpu_is_shared(OTHER, device)
    else:
        with pytest.raises(EngineError, match=r"does not see the trainer's GPU .* Set sync.name=filesystem"):
            neighbour.check_gpu_is_shared(OTHER, device)


def test_handles_of_a_gpu_do_not_leave_the_machine(neighbours):
    neighbours(None, None)
    with pytest.raises(EngineError, match=r"http://192.0.2.1:30000 is on another machine. Set sync.name="):
        neighbour.check_gpu_is_shared("http://192.0.2.1:30000", torch.device("cuda"))


def test_versions_of_nccl_are_compared_before_joining(monkeypatch, tmp_path):
    site = tmp_path / "lib" / "site-packages"
    library = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    (site / "nvidia_nccl_cu13-2.30.7.dist-info").mkdir(parents=True)
    assert neighbour.nccl_beside(library) == "2.30.7"
    assert neighbour.nccl_beside(tmp_path / "libnccl.so.2") is None

    class Process:
        def memory_maps(self):
            return [type("Map", (), {"path": path}) for path in ("[heap]", str(library))]

    monkeypatch.setattr(neighbour, "_processes", lambda url: iter([Process()]))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    neighbour.check_same_nccl(OTHER)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    with pytest.raises(EngineError, match=r"the trainer has 2.29.7, .* has 2.30.7. Set sync.name=filesystem"):
        neighbour.check_same_nccl(OTHER)
    monkeypatch.setattr(neighbour, "_processes", lambda url: iter(()))
    neighbour.check_same_nccl(OTHER)  # nobody knows
