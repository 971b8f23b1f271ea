"""Adapters on their way to engines: versions that never change, names that are never used twice, and proof that they act."""

import asyncio
import copy
import json
from types import SimpleNamespace

import peft
import pytest
import torch
from fault_server import FaultServer, _Refusal
from safetensors.torch import load_file
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ConfigError, EngineError, StaleWeightsError, UnreachableError, WeightsError
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.servers.clients.adapters import adapter_name
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher, LoraPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.transport import Retry
from rl4llm.sync.inference import MemoryPublisher
from rl4llm.sync.verify import Canary

PROMPT = [5, 9, 40, 33, 7]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)


class AdapterServer(FaultServer):
    """SGLang's way with adapters: loading a name twice is refused, naming an unloaded one loads its old path again."""

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        self.enabled = True
        self.loads = []
        setattr(self, "_v1/models", self._models)

    async def start(self):
        await super().start()
        self.adapters, self.remembered = {}, {}

    async def _models(self, body):
        return {"data": [{"id": "base"}, *({"id": name, "parent": "base"} for name in self.adapters)]}

    async def _server_info(self, body):
        return {**await super()._server_info(body), "enable_lora": self.enabled}

    async def _load_lora_adapter(self, body):
        name, path = body["lora_name"], body["lora_path"]
        if not self.enabled or name in self.adapters:
            raise _Refusal("LoRA is not enabled." if not self.enabled else f"{name} is loaded already")
        merged = peft.PeftModel.from_pretrained(copy.deepcopy(self.model), path).merge_and_unload()
        inner = FaultServer(merged, self._tokenizer)
        inner.model, inner.engine, inner.weight_version = (
            merged,
            LocalClient(merged, self._tokenizer),
            "default",
        )
        self.adapters[name], self.remembered[name] = inner, path
        self.loads.append(name)
        return {"success": True}

    async def _unload_lora_adapter(self, body):
        if body["lora_name"] not in self.adapters:
            raise _Refusal(f"{body['lora_name']} is not loaded")
        await self.adapters.pop(body["lora_name"]).engine.close()
        return {"success": True}

    async def _generate(self, body):
        name = body.get("lora_path")
        if name is None:
            return await super()._generate(body)
        if name not in self.adapters:
            if name not in self.remembered:
                raise _Refusal(f"Got LoRA adapter that has never been loaded: {name}")
            await self._load_lora_adapter({"lora_name": name, "lora_path": self.remembered[name]})
        self.bodies.append(body)
        return await self.adapters[name]._generate(body)


@pytest.fixture
def backend(model):
    model = load_model(model)
    return TorchBackend(model, lr=1e-3, adapter=add_adapter(model, rank=4, seed=1))


@pytest.fixture
def play(model, backend, tokenizer, tmp_path):
    """Run `scene(server, client, publish)`; `publish(version)` changes the adapter first, and verifies nothing."""
    plain = copy.deepcopy(model)

    def run(scene):
        async def main():
            server = AdapterServer(_plain(plain, backend), tokenizer)
            await server.start()
            client = SGLangClient(server.url, tokenizer, vocab_size=len(tokenizer), context_length=512)
            client.retry = Retry(4, first_wait_s=0.001)
            publisher = LoraPublisher(client, WeightStore(tmp_path))

            async def publish(version):
                change(backend, version)
                return await publisher.publish(backend, version)

            try:
                return await scene(
                    SimpleNamespace(server=server, client=client, publish=publish, publisher=publisher)
                )
            finally:
                await client.close()
                await server.stop()

        return asyncio.run(main())

    return run


def _plain(model, backend):
    """A model without an adapter and with the base's weights, as a server starts from them."""
    fresh = type(model)(model.config)
    fresh.load_state_dict(dict(backend.adapter.base_parameters()), strict=False)
    fresh.tie_weights()
    return fresh.eval()


def change(backend, seed, scale=0.05):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backend.model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def canary(client, tolerance=1e-4):
    return Canary(client.vocab_size, dtype="float32", tolerance=tolerance)


def test_a_version_is_a_complete_peft_directory_or_absent(backend, model, tmp_path):
    change(backend, 1)
    store = WeightStore(tmp_path)
    weight_ref = LoraPublisher(None, store).write(backend, 12)
    assert (weight_ref.kind, weight_ref.version, store.latest()) == ("lora", 12, weight_ref)
    files = {path.name for path in (tmp_path / "v000012").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "manifest.json"}
    merged = (
        peft.PeftModel.from_pretrained(_plain(model, backend), weight_ref.path)
        .merge_and_unload()
        .state_dict()
    )
    for name, tensor in backend.weights():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)
    assert LoraPublisher(None, store).write(backend, 12) == weight_ref
    (tmp_path / "v000012" / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsError):
        store.verify(weight_ref)


def test_the_files_of_an_adapter_are_those_that_peft_would_write(backend, tmp_path):
    change(backend, 1)
    weight_ref = LoraPublisher(None, WeightStore(tmp_path / "store")).write(backend, 1)
    (tmp_path / "plain").mkdir()
    backend.write_adapter(tmp_path / "plain")
    ours, plain = (
        load_file(f"{path}/adapter_model.safetensors") for path in (weight_ref.path, tmp_path / "plain")
    )
    state = peft.get_peft_model_state_dict(backend.model)
    assert ours.keys() == plain.keys() == {f"base_model.model.{name}" for name in state}
    assert all(torch.equal(ours[name], plain[name]) for name in ours)


def test_an_adapter_that_is_not_finite_is_never_written(backend, tmp_path):
    with torch.no_grad():
        next(item for item in backend.model.parameters() if item.requires_grad)[0, 0] = float("nan")
    with pytest.raises(WeightsError):
        LoraPublisher(None, WeightStore(tmp_path)).write(backend, 1)
    assert not list(tmp_path.glob("v*"))


def test_an_adapter_damaged_on_disk_reaches_no_server(backend, tmp_path):
    class Damaging(WeightStore):
        def write(self, *args, **options):
            weight_ref = super().write(*args, **options)
            with open(f"{weight_ref.path}/adapter_model.safetensors", "r+b") as file:
                file.seek(-4, 2)
                file.write(b"\xff\xff\xff\x3f")
            return weight_ref

    asked = []
    with pytest.raises(WeightsError):
        asyncio.run(LoraPublisher(SimpleNamespace(load=asked.append), Damaging(tmp_path)).publish(backend, 1))
    assert asked == []


@pytest.mark.parametrize("path", ["fast", "graph", "model"])
def test_the_embedded_engine_samples_from_the_adapted_weights(backend, tokenizer, path):
    client = LocalClient(backend.model, tokenizer, path=path)

    async def work():
        first = await MemoryPublisher(client).publish(backend, 0)
        await canary(client).verify(backend, client, first)
        before = await client.score(PROMPT)
        change(backend, 1, 0.2)
        weight_ref = await MemoryPublisher(client).publish(backend, 1)
        await canary(client).verify(backend, client, weight_ref)
        assert max(abs(a - b) for a, b in zip(before, await client.score(PROMPT), strict=True)) > 1e-2
        completion = await client.generate(PROMPT, PARAMS)
        ids = torch.tensor([[*PROMPT, *completion.token_ids]])
        logp_TV = backend.model(ids).logits[0].log_softmax(-1)
        expected = [logp_TV[place - 1, ids[0, place]].item() for place in range(len(PROMPT), ids.shape[1])]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        await client.close()

    asyncio.run(work())


def test_an_engine_that_was_made_before_the_adapter_notices_it(model, tokenizer):
    model = load_model(model)
    client = LocalClient(model, tokenizer)
    backend = TorchBackend(model, lr=1e-3, adapter=add_adapter(model, rank=4))
    change(backend, 1, 0.2)

    async def work():
        weight_ref = await MemoryPublisher(client).publish(backend, 1)
        await canary(client).verify(backend, client, weight_ref)
        await client.close()

    asyncio.run(work())


def test_each_version_is_proven_and_requests_name_it(play, backend):
    async def scene(stage):
        for version in (0, 1, 2):
            weight_ref = await stage.publish(version)
            assert await canary(stage.client).verify(backend, stage.client, weight_ref) < 1e-4
            completion = await stage.client.generate(PROMPT, PARAMS)
            assert completion.version == version
            name = adapter_name("rl4llm", weight_ref)
            assert stage.server.bodies[-1]["lora_path"] == name
            assert name.endswith(f"-v{version:06d}")
            assert list(stage.server.adapters) == [name]
        assert stage.server.calls["/pause_generation"] == 0
        change(backend, 9)
        with pytest.raises(StaleWeightsError):
            await canary(stage.client).verify(backend, stage.client, weight_ref)

    play(scene)


def test_a_request_under_way_keeps_its_adapter_until_it_ends(play):
    async def scene(stage):
        first = await stage.publish(1)
        task = asyncio.create_task(stage.client.generate(PROMPT, PARAMS.replace(max_tokens=400)))
        while not await _running(stage.server):
            await asyncio.sleep(0.001)
        second = await stage.publish(2)
        names = [adapter_name("rl4llm", ref) for ref in (first, second)]
        assert list(stage.server.adapters) == names
        later = await stage.client.generate(PROMPT, PARAMS)
        assert ((await task).version, later.version) == (1, 2)
        assert list(stage.server.adapters) == names[1:]
        assert stage.server.loads == names

    play(scene)


async def _running(server):
    return any([(await inner.engine.health())["rows_active"] for inner in server.adapters.values()])


def test_a_restarted_server_gets_its_adapter_again(play, backend):
    async def scene(stage):
        weight_ref = await stage.publish(7)
        stage.server.kill()
        await stage.server.start()
        assert await stage.client.version() == -1
        with pytest.raises(StaleWeightsError):
            await canary(stage.client).verify(backend, stage.client, weight_ref)
        with pytest.raises(UnreachableError):
            await stage.client.generate(PROMPT, PARAMS)
        await stage.client.load(weight_ref)
        await canary(stage.client).verify(backend, stage.client, weight_ref)

    play(scene)


def test_only_adapters_of_earlier_runs_are_unloaded(play):
    async def scene(stage):
        old = await stage.publish(40)
        for name in ("somebody-elses", "rl4llm-0123abcd-v000041"):
            await stage.server._load_lora_adapter({"lora_name": name, "lora_path": old.path})
        ref = await stage.publish(12)
        assert list(stage.server.adapters) == ["somebody-elses", adapter_name("rl4llm", ref)]

    play(scene)


def test_a_load_that_fails_leaves_the_version_that_was_there(play):
    async def scene(stage):
        weight_ref = await stage.publish(3)
        wrong = type(weight_ref)(4, "lora", weight_ref.path + "-nowhere")
        with pytest.raises(EngineError):
            await stage.client.load(wrong)
        assert await stage.client.version() == 3
        assert (await stage.client.generate(PROMPT, PARAMS)).version == 3

    play(scene)


def test_a_server_without_adapters_stops_the_run(play):
    async def scene(stage):
        stage.server.enabled = False
        with pytest.raises(EngineError):
            await stage.publish(1)

    play(scene)


def test_full_weights_take_the_place_of_an_adapter(play, backend, tmp_path):
    async def scene(stage):
        await stage.publish(1)
        files = FilesystemPublisher(stage.client, WeightStore(tmp_path / "full"))
        weight_ref = await files.publish(backend, 2)
        assert not stage.server.adapters
        await canary(stage.client).verify(backend, stage.client, weight_ref)
        assert (await stage.client.generate(PROMPT, PARAMS)).version == 2
        assert "lora_path" not in stage.server.bodies[-1]

    play(scene)


ROWS = [{"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": ""} for i in range(4)]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model.lora.rank": 0}, "model.lora.rank above 0"),
        ({"inference.name": "local"}, "Accepted: memory"),
        ({"inference.cohost": True}, "inference.cohost=true publishes through files"),
        ({"inference.router": "http://127.0.0.1:9"}, "inference.router"),
        ({"sync.fallback": "filesystem"}, "sync.fallback"),
    ],
)
def test_conflicts_with_adapters_are_found_before_any_write(model_dir, tmp_path, keys, says):
    usual = {
        "model.lora.rank": 4,
        "inference.name": "sglang",
        "sync.name": "lora",
        "output.dir": str(tmp_path / "run"),
    }
    with pytest.raises(ConfigError, match=says):
        GRPOTrainer(str(model_dir), ROWS, [Vowels()], **(usual | keys))
    assert not (tmp_path / "run").exists()


def learn(model_dir, directory, **keys):
    GRPOTrainer(
        str(model_dir),
        ROWS,
        [Vowels()],
        output={"dir": str(directory)},
        rollout={"prompts": 4, "group_size": 16, "max_tokens": 8},
        mismatch={"stop_above": 1e-4},
        **keys,
    ).train()
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_grpo_learns_an_adapter_with_the_embedded_engine(model, tokenizer, tmp_path):
    with torch.no_grad():
        # the output layer is frozen, so what comes before it must be able to move it
        model.model.norm.weight *= 6
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    keys = {"model.lora": {"rank": 8}, "training": {"lr": 1e-2}, "checkpoint.every": 6, "deterministic": True}
    steps = learn(tmp_path / "model", tmp_path / "once", max_steps=12, **keys)
    rewards = [step["reward/mean"] for step in steps]
    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 > 0.6
    learn(tmp_path / "model", tmp_path / "twice", max_steps=6, **keys)
    again = learn(tmp_path / "model", tmp_path / "twice", max_steps=12, **keys)
    assert [step["reward/mean"] for step in again] == rewards
    saved = "checkpoints/step-000012/model/weights.safetensors"
    ours, theirs = (load_file(tmp_path / name / saved) for name in ("once", "twice"))
    assert all("lora_" in name and torch.equal(ours[name], theirs[name]) for name in ours)
