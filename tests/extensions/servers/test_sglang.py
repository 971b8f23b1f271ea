"""The real SGLang: it samples what a plain forward would, takes weights every way, and learns."""

import asyncio
import copy
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from ended_runs import metrics
from fault_server import change, logprobs
from kept_cache import by_parts
from safetensors.torch import load_file, save_file
from sweeps import sampled
from vowels import learn_vowels

from rl4llm.backends.lora import add_adapter
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EngineError, RefusedError, StaleWeightsError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.adapters import adapter_name
from rl4llm.extensions.servers.clients.server import DamagedReplyError
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.fleet.cohosted import CohostedFleet
from rl4llm.extensions.servers.sync.distributed import BroadcastPublisher, over_broadcast
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher, LoraPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.extensions.servers.sync.wrappers import CohostPublisher
from rl4llm.runtime.transport import Retry
from rl4llm.sync.verify import Canary
from rl4llm.testing import check_client

pytestmark = pytest.mark.sglang
PROMPT = [5, 9, 40, 33, 7]
WAYS = ["filesystem", "distributed"]


def client_of(url, tokenizer, **options):
    return SGLangClient(url, tokenizer, vocab_size=len(tokenizer), context_length=512, **options)


@pytest.fixture
def client(sglang_url, tokenizer):
    client = client_of(sglang_url, tokenizer)
    yield client
    asyncio.run(client.close())


@pytest.fixture
def backend(model):
    return TorchBackend(load_model(model), lr=1e-3)


def publisher(name, client, root):
    return (
        FilesystemPublisher(client, WeightStore(root)) if name == "filesystem" else BroadcastPublisher(client)
    )


def canary(client):
    return Canary(client.vocab_size, dtype="float32", tolerance=1e-4)


def change_adapter(backend, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in backend.adapter.weights():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)


def run(client, work):
    """Run a coroutine function; connections belong to the event loop."""

    async def whole():
        try:
            return await work()
        finally:
            await client.disconnect()

    return asyncio.run(whole())


def test_it_keeps_the_contract_of_clients(client, backend, tmp_path):
    run(client, lambda: publisher("filesystem", client, tmp_path).publish(backend, 1))
    check_client(client, [PROMPT, [8, 100, 3]], tolerance=1e-5, seeded=False)


@pytest.mark.parametrize("way", WAYS)
def test_every_publisher_passes_the_canary(client, backend, tmp_path, way):
    async def work():
        publishes = publisher(way, client, tmp_path)
        for version in (1, 2):
            change(backend.model, version)
            weight_ref = await publishes.publish(backend, version)
            assert await canary(client).verify(backend, client, weight_ref) < 1e-4
            completion = await client.generate(PROMPT, SamplingParams(max_tokens=32, ignore_eos=True))
            assert completion.version == version
            assert completion.logprobs == pytest.approx(
                logprobs(backend.model, PROMPT, completion.token_ids), abs=1e-5
            )

    run(client, work)


def test_matrices_in_half_precision_arrive_as_from_files(client, backend, tmp_path):
    async def work():
        exact, half = WeightStore(tmp_path / "exact"), WeightStore(tmp_path / "half", dtype=torch.bfloat16)
        change(backend.model, 3)
        await over_broadcast(client, lambda: exact, None).publish(backend, 1)
        before = await client.checksum()
        await over_broadcast(client, lambda: half, None).publish(backend, 2)
        digest = await client.checksum()
        await FilesystemPublisher(client, half).publish(backend, 3)
        assert await client.checksum() == digest != before

    run(client, work)


def test_every_token_is_scored_as_the_trainer_scores_it(client, backend, tmp_path):
    async def work():
        await publisher("filesystem", client, tmp_path).publish(backend, 1)
        others = [client.vocab_size - 1, 0, 12]
        expected = logprobs(backend.model, PROMPT[:1], [*PROMPT[1:], *others])
        assert await client.score([*PROMPT, *others]) == pytest.approx(expected, abs=1e-5)

    run(client, work)


def test_spans_of_an_interrupted_turn_match_their_own_weights(client, backend, tmp_path):
    publishes = publisher("filesystem", client, tmp_path)
    before, split = run(client, lambda: interrupted(client, publishes, backend))
    for prompt, completion in split:
        old = completion.versions[1][0]
        by_old, by_new = (logprobs(model, prompt, completion.token_ids) for model in (before, backend.model))
        assert completion.logprobs[:old] == pytest.approx(by_old[:old], abs=1e-4)
        assert completion.logprobs[old:] == pytest.approx(by_new[old:], abs=1e-4)
        assert by_old[old:] != pytest.approx(by_new[old:], abs=1e-2)


async def interrupted(client, publishes, backend):
    """Publish while requests are under way.

    Return the model before it, and the prompts and completions that both versions sampled.
    """
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    prompts = [[*PROMPT, n] for n in range(8)]
    for version, wait_s in ((4, 0.3), (14, 0.1), (24, 0.03)):  # until the machine is slow enough
        await publishes.publish(backend, version)
        before = copy.deepcopy(backend.model)
        tasks = [asyncio.create_task(client.generate(prompt, params)) for prompt in prompts]
        await asyncio.sleep(wait_s)
        change(backend.model, 5)
        weight_ref = await publishes.publish(backend, version + 1)
        later = await client.generate(prompts[3], params)
        completions = zip(prompts, await asyncio.gather(*tasks), strict=True)
        assert await canary(client).verify(backend, client, weight_ref) < 1e-4
        if split := [(prompt, completion) for prompt, completion in completions if completion.versions]:
            break
    assert split, "no request was under way while the weights changed"
    for _, completion in split:
        (first, old), (second, new) = completion.versions
        assert (first, old, new) == (0, version, version + 1)
        assert 0 < second < 200
    assert later.logprobs == pytest.approx(logprobs(backend.model, prompts[3], later.token_ids), abs=1e-4)
    return before, split


def test_a_refused_load_lets_a_kept_cache_go(sglang_url, tokenizer, backend, tmp_path):
    client = client_of(sglang_url, tokenizer, keep_cache=True, visible_within_s=0.1)

    async def work():
        await publisher("filesystem", client, tmp_path).publish(backend, 1)
        running = asyncio.create_task(
            client.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        )
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError) as refused:
            await client.load(WeightRef(2, "full", str(tmp_path / "nowhere")))
        assert "flush_cache" not in str(refused.value)
        await running

    run(client, work)


@pytest.mark.parametrize("way", sampled(WAYS, ["distributed"]))
def test_a_kept_cache_is_that_of_older_weights(sglang_url, tokenizer, backend, tmp_path, way):
    client = client_of(sglang_url, tokenizer, keep_cache=True)
    before, split = run(client, lambda: interrupted(client, publisher(way, client, tmp_path), backend))
    for prompt, completion in split:
        old = completion.versions[1][0]
        mixed = by_parts([(before, old), (backend.model, 200 - old)], prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(mixed, abs=1e-4)


def test_the_server_refuses_a_repeated_request_id(client):
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    async def work():
        await client.pause()  # so that the first cannot be over before the second is there
        twice = [asyncio.create_task(client.sample(PROMPT, params, "twice", ())) for _ in range(2)]
        await asyncio.wait(twice, return_when=asyncio.FIRST_COMPLETED)
        await client.resume()
        found = await asyncio.gather(*twice, return_exceptions=True)
        assert any(isinstance(item, RefusedError) and "uplicate" in str(item) for item in found), found
        same = [client.generate(PROMPT, params, session="1/p/0") for _ in range(4)]
        assert len(await asyncio.gather(*same)) == 4

    run(client, work)


@pytest.mark.parametrize("way", sampled([*WAYS, "lora"], ["lora"]))
def test_grpo_learns_through_the_server(client, model, model_dir, learns, adaptable, tmp_path, way):
    base = adaptable(model) if way == "lora" else model_dir
    run(client, lambda: client.load(WeightRef(0, "full", str(base))))
    learns(base, tmp_path / "run", {"name": "sglang", "url": client.base_url}, way)


def test_versions_of_an_adapter_share_a_batch_and_each_is_proven(client, backend, model, tmp_path):
    async def work():
        await publisher("filesystem", client, tmp_path / "base").publish(backend, 50)
        with_adapter = load_model(copy.deepcopy(model))
        adapted = TorchBackend(with_adapter, lr=1e-3, adapter=add_adapter(with_adapter, rank=8))
        way = LoraPublisher(client, WeightStore(tmp_path / "adapters"))
        before, tasks = {}, {}
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        for version in (0, 1, 2):
            change_adapter(adapted, version)
            weight_ref = await way.publish(adapted, version)
            assert await canary(client).verify(adapted, client, weight_ref) < 1e-4
            before[version] = copy.deepcopy(adapted.model)
            tasks[version] = asyncio.create_task(client.generate(PROMPT, params))
            await asyncio.sleep(0.2)
        for version, task in tasks.items():
            completion = await task
            assert completion.version == version
            assert completion.logprobs == pytest.approx(
                logprobs(before[version], PROMPT, completion.token_ids), abs=1e-4
            )
        assert await client._listed() == {adapter_name("rl4llm", weight_ref)}
        assert await client.version() == 2
        await client.load(WeightRef(51, "full", str(tmp_path / "base" / "v000050")))
        assert await client.version() == 51
        assert await client._listed() == set()
        await canary(client).verify(backend, client, WeightRef(51, "full"))

    run(client, work)


DDP, FSDP2 = {"name": "torch", "shard": "ddp"}, {"name": "torch", "shard": "fsdp2"}
ZERO2, ZERO3 = ({"name": "deepspeed", "zero_stage": stage} for stage in (2, 3))
TWO_RANKS = [
    pytest.param("distributed", DDP, id="distributed-ddp"),
    pytest.param("lora", FSDP2, id="lora-fsdp2"),
    pytest.param(
        "filesystem", ZERO2, id="filesystem-zero-2", marks=[pytest.mark.deepspeed, pytest.mark.sweep]
    ),
    pytest.param("filesystem", ZERO3, id="filesystem-zero-3", marks=pytest.mark.deepspeed),
]


@pytest.mark.parametrize(("way", "backend"), TWO_RANKS)
def test_two_ranks_publish_every_way_to_the_server(
    on_ranks, client, model, adaptable, tmp_path, way, backend
):
    base = adaptable(model)
    run(client, lambda: client.load(WeightRef(0, "full", str(base))))
    options = {"backend": backend, "sync": {"name": way}, "training.lr": 1e-2, "max_steps": 2}
    options |= {"model.lora": {"rank": 4}} if way == "lora" else {}
    on_ranks(trained, base, tmp_path / "run", {"name": "sglang", "url": client.base_url}, options)
    rows = metrics(tmp_path / "run")
    assert [row.get("mismatch/max", 0) < 1e-4 and "time/verify" in row for row in rows] == [True] * 2
    assert any("mismatch/max" in row for row in rows)


def trained(ranks, model_dir, directory, inference, options):
    learn_vowels(ranks, model_dir, directory, inference, **options)


def test_damaged_weights_give_no_sample_and_fail_the_canary(client, backend, tmp_path):
    async def work():
        way = publisher("filesystem", client, tmp_path)
        weight_ref = way.write(backend, 60)
        file = next((tmp_path / "v000060").glob("*.safetensors"))
        tensors = load_file(file)
        tensors["model.norm.weight"][:] = float("nan")
        save_file(tensors, file, metadata={"format": "pt"})
        await client.load(weight_ref)
        assert await client.version() == 60  # the server says that all is well
        with pytest.raises(StaleWeightsError):
            await canary(client).verify(backend, client, weight_ref)
        client.retry = Retry(2, first_wait_s=0.01)
        with pytest.raises(DamagedReplyError):
            await client.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
        await canary(client).verify(backend, client, await way.publish(backend, 60))
        assert (await client.generate(PROMPT, SamplingParams(max_tokens=4))).version == 60

    run(client, work)


def test_a_refused_load_leaves_no_old_cache(client, backend, tmp_path):
    class InPlace(SGLangClient):
        """Keeps requests in their places, over which SGLang cannot forget its cache."""

        async def pause(self):
            await super().pause("in_place")

    async def work():
        way = publisher("filesystem", client, tmp_path)
        await way.publish(backend, 70)
        digest = await client.checksum()
        tasks = [
            asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)))
        ]
        await asyncio.sleep(0.2)
        change(backend.model, 7)
        weight_ref = way.write(backend, 71)
        rash = InPlace(client.base_url, client._tokenizer, vocab_size=client.vocab_size, context_length=512)
        with pytest.raises(EngineError):
            await rash.load(weight_ref)
        assert await client.checksum() != digest
        await asyncio.gather(*tasks)
        await client.load(weight_ref)
        assert await canary(client).verify(backend, client, weight_ref) < 1e-4
        completion = await client.generate(PROMPT, SamplingParams(max_tokens=32, ignore_eos=True))
        assert completion.logprobs == pytest.approx(
            logprobs(backend.model, PROMPT, completion.token_ids), abs=1e-5
        )
        await rash.close()

    run(client, work)


def test_an_open_update_of_a_dead_trainer_is_closed(client, backend):
    async def work():
        await client.http.post("/begin_weight_update", {})
        weight_ref = await BroadcastPublisher(client).publish(backend, 80)
        assert await canary(client).verify(backend, client, weight_ref) < 1e-4

    run(client, work)


def test_files_that_show_late_are_waited_for(client, backend, tmp_path):
    async def work():
        way = publisher("filesystem", client, tmp_path)
        await way.publish(backend, 90)
        weight_ref = way.write(backend, 91)
        (tmp_path / "v000091").rename(tmp_path / "hidden")
        load = asyncio.create_task(client.load(weight_ref))
        await asyncio.sleep(1)
        assert await client.version() == 90
        (tmp_path / "hidden").rename(tmp_path / "v000091")
        await load
        assert await client.version() == 91

    run(client, work)


def test_the_loop_of_the_examples_trains_against_a_server(sglang_url, model_dir):
    place = str(Path(__file__).parents[3] / "examples")
    sys.path.append(place)
    try:
        loop, prompts = import_module("loop_sglang").loop, import_module("shared").prompts
    finally:
        sys.path.remove(place)
    backend = loop(str(model_dir), sglang_url, prompts("Guess.", answers=["3", "4", "5", "6"]), steps=2)
    start = dict(TorchBackend(load_model(str(model_dir)), lr=0.0).weights())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in backend.weights())


@pytest.fixture
def newcomer(sglang_url, tokenizer):
    """Make further clients of the server, as trainers do that start again."""

    def make():
        return SGLangClient(sglang_url, tokenizer, vocab_size=len(tokenizer), context_length=512)

    return make


def test_a_request_under_way_ends_before_the_server_sleeps(client, backend, tmp_path):
    params = SamplingParams(max_tokens=400, ignore_eos=True)

    async def work():
        await publisher("filesystem", client, tmp_path).publish(backend, 1)
        abandoned = [asyncio.create_task(client.generate(PROMPT, params)) for _ in range(8)]
        await asyncio.sleep(0.3)
        await client.sleep()
        ended = await asyncio.wait_for(asyncio.gather(*abandoned), 30)
        assert all(one.finish_reason == "abort" for one in ended)
        await client.wake()
        assert (await client.generate(PROMPT, params.replace(max_tokens=4))).version == 1

    run(client, work)


def test_a_sleeping_server_is_found_by_the_next_trainer(client, newcomer, backend, tmp_path):
    """Without the note, the real server dies when it is woken twice (and on a GPU when it is put to sleep twice)."""
    publishes, second, third = publisher("filesystem", client, tmp_path), newcomer(), newcomer()

    async def killed():
        await publishes.publish(backend, 1)
        await client.sleep()

    async def restarted():
        assert await second.version() == 1
        await second.sleep()
        change(backend.model, 5)
        weight_ref = publishes.write(backend, 2)
        with pytest.raises(EngineError):
            await second.load(weight_ref)
        assert "device" in await second.health()  # which does not generate
        for tag in ("weights", "weights"):
            await second.wake((tag,))
        await second.load(weight_ref)

    async def restarted_again():  # the second one died before it woke the cache
        assert await third.version() == 2
        await third.sleep()
        for tag in ("weights", "kv_cache", "kv_cache"):
            await third.wake((tag,))
        weight_ref = WeightRef(2, "full", str(tmp_path / "v000002"))
        assert await canary(third).verify(backend, third, weight_ref) < 1e-4

    for trainer, work in ((client, killed), (second, restarted), (third, restarted_again)):
        run(trainer, work)


def test_a_server_sleeps_and_wakes_with_the_trainer(newcomer, backend, tmp_path):
    fleet = CohostedFleet([newcomer()])
    publishes = CohostPublisher(fleet, FilesystemPublisher(fleet, WeightStore(tmp_path)))
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    async def steps():
        for version in (1, 2, 3):
            change(backend.model, version)
            expected_BT = canary(fleet).expected(backend)
            weight_ref = await publishes.publish(backend, version)
            assert await canary(fleet).compare(expected_BT, fleet, weight_ref) < 1e-4
            found = await asyncio.gather(*(fleet.generate(PROMPT, params) for _ in range(8)))
            assert {completion.version for completion in found} == {version}

    run(fleet, steps)


def test_the_health_of_a_sleeping_server_waits_until_it_wakes(client, backend, tmp_path):
    """Whatever probes it, such as Kubernetes: the request that it makes for that must not reach the sleeping engine."""

    async def work():
        await publisher("filesystem", client, tmp_path).publish(backend, 1)
        await client.sleep()
        probe = asyncio.create_task(client.http.ping("/health", deadline_s=30))
        await asyncio.sleep(3)
        assert not probe.done()
        await client.wake()
        await probe

    run(client, work)
