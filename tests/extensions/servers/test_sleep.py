"""A server that sleeps while the trainer has the device, against a stand-in that dies of what SGLang on a GPU dies of."""

import asyncio

import pytest
from ended_runs import metrics
from fault_server import FaultServer, hang, serving, status
from vowels import Vowels

import rl4llm.compose.trainer as composed
from rl4llm.api import GRPOTrainer, PPOTrainer
from rl4llm.backends.heads import ValueHead
from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ConfigError, EngineError
from rl4llm.core.types import SamplingParams
from rl4llm.extensions.judges import reward_model
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.runtime.transport import Retry


class Strict(FaultServer):
    """A server that dies where SGLang on a GPU dies: of a request while it falls asleep or sleeps, of sleeping twice, and of
    waking twice."""

    def __init__(self, *args):
        super().__init__(*args, one_by_one=True)
        self.asleep, self.deaths, self.under_way = set(), [], set()
        self.order = []

    async def _die(self, cause):
        self.deaths.append(cause)
        self.kill()
        await asyncio.Event().wait()

    async def _generate(self, body):
        if self.asleep:
            await self._die("asked to generate asleep")
        task = asyncio.current_task()
        self.under_way.add(task)
        try:
            return await super()._generate(body)
        finally:
            self.under_way.discard(task)

    async def _health(self, body):
        if self.asleep and not self.paused:
            await self._die("asked for its health asleep")
        return await super()._health(body)

    async def _pause_generation(self, body):
        self.order.append(body["mode"])
        if body["mode"] == "abort":
            for task in self.under_way:
                task.cancel()
        return await super()._pause_generation(body)

    async def _release_memory_occupation(self, body):
        if self.under_way:
            await self._die("put to sleep with requests")
        if self.asleep & set(body["tags"]):
            await self._die("put to sleep twice")
        self.asleep |= set(body["tags"])
        self.order.append("sleeps")

    async def _resume_memory_occupation(self, body):
        if not set(body["tags"]) <= self.asleep:
            await self._die("woken twice")
        self.asleep -= set(body["tags"])

    async def _update_weights_from_disk(self, body):
        if "weights" in self.asleep:
            await self._die("loaded asleep")
        return await super()._update_weights_from_disk(body)


def client_of(server, tokenizer):
    return SGLangClient(server.url, tokenizer, vocab_size=len(tokenizer), context_length=512)


def alone(client, work):
    async def whole():
        try:
            return await work()
        finally:
            await client.disconnect()

    return asyncio.run(whole())


ROWS = [{"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": ""} for i in range(2)]


def trainer(kind, model_dir, directory, server, rewards=None, **options):
    return kind(
        str(model_dir),
        ROWS,
        rewards or [Vowels()],
        output={"dir": str(directory)},
        inference={"name": "sglang", "url": server.url, "cohost": True, "deadline_s": 30.0},
        rollout={"prompts": 2, "group_size": 4, "max_tokens": 8},
        **options,
    )


@pytest.mark.parametrize("left", ["awake", "asleep", "without a cache"])
def test_a_run_starts_with_what_a_killed_run_left(model_dir, tokenizer, tmp_path, monkeypatch, left):
    build = composed.build_policy

    def build_policy(*args):
        assert server.asleep == {"weights", "kv_cache"}
        return build(*args)

    monkeypatch.setattr(composed, "build_policy", build_policy)
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        before = client_of(server, tokenizer)

        async def killed():
            await before.sleep()
            if left == "without a cache":
                await before.wake(("weights",))

        if left != "awake":
            alone(before, killed)
        reference = {"algorithm": {"kl_coef": 0.1}, "max_steps": 2}
        trainer(GRPOTrainer, model_dir, tmp_path / "run", server, **reference).train()
        assert (server.deaths, server.asleep, server.paused) == ([], set(), False)
    rows = metrics(tmp_path / "run")
    assert [row["mismatch/max"] < 1e-4 for row in rows if "loss" in row] == [True] * 2


def test_a_reward_model_loads_while_the_server_sleeps(model, model_dir, tokenizer, tmp_path, monkeypatch):
    judge = tmp_path / "judge"
    judge.mkdir()
    tokenizer.save_pretrained(judge)
    TorchBackend(model, value_head=ValueHead(model.config.hidden_size)).export(judge)
    load, slept = reward_model.load_model, []

    def load_model_of_reward(*args, **options):
        slept.append(set(server.asleep))
        return load(*args, **options)

    monkeypatch.setattr(reward_model, "load_model", load_model_of_reward)
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        scored_by = [{"name": "reward_model", "path": str(judge)}]
        trainer(GRPOTrainer, model_dir, tmp_path / "run", server, rewards=scored_by)
    assert slept == [{"weights", "kv_cache"}]


def test_abandoned_requests_end_before_the_server_sleeps(model_dir, tokenizer):
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        client = client_of(server, tokenizer)
        client.retry = Retry(1)

        async def work():
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            left = [asyncio.create_task(client.generate([5, 6], params)) for _ in range(4)]
            while len(server.under_way) < 4:
                await asyncio.sleep(0.01)
            server.next("/flush_cache", status(400), status(400))
            await client.sleep()
            assert server.calls["/flush_cache"] == 3
            await asyncio.gather(*left, return_exceptions=True)
            await client.sleep()
            await client.wake()
            await client.wake()
            assert (await client.generate([5, 6], params.replace(max_tokens=2))).token_ids

        alone(client, work)
        assert server.deaths == []
        assert server.order[:2] == ["abort", "sleeps"]


def test_a_server_that_never_gets_idle_is_not_put_to_sleep(model_dir, tokenizer, monkeypatch):
    monkeypatch.setattr("rl4llm.extensions.servers.clients.sglang.IDLE_S", 0.3)
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        client = client_of(server, tokenizer)

        async def work():
            server.next("/flush_cache", *[status(400)] * 100)
            with pytest.raises(EngineError):
                await client.sleep()

        alone(client, work)
        assert server.asleep == set()


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation"])
def test_a_server_in_an_unknown_state_is_left_alone(model_dir, tokenizer, path):
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        first, second = client_of(server, tokenizer), client_of(server, tokenizer)

        async def killed():
            if path.startswith("/resume"):
                await first.sleep()
            server.next(path, hang())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await (first.wake() if path.startswith("/resume") else first.sleep())

        alone(first, killed)

        async def restarted():
            for ask in (second.sleep, second.wake, second.version, second.health):
                with pytest.raises(EngineError):
                    await ask()

        alone(second, restarted)
        assert server.deaths == []


def test_a_server_that_cannot_free_memory_is_refused(model_dir, tokenizer):
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        client = client_of(server, tokenizer)

        async def on_a_gpu(body):
            return {"version": "0.5.23", "tp_size": 1, "device": "cuda", "enable_memory_saver": False}

        server._server_info = on_a_gpu

        async def work():
            with pytest.raises(ConfigError):
                await client.sleep()

        alone(client, work)
        assert (server.asleep, server.paused) == (set(), False)


def test_weights_are_not_loaded_into_a_sleeping_server(model, model_dir, tokenizer, tmp_path):
    backend = TorchBackend(load_model(model), lr=1e-3)
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        client = client_of(server, tokenizer)

        async def work():
            await client.sleep()
            publisher = FilesystemPublisher(client, WeightStore(tmp_path / "other"))
            with pytest.raises(EngineError):
                await publisher.publish(backend, 1)
            assert server.paused
            await client.health()

        alone(client, work)
        assert server.deaths == []


def test_a_router_in_front_of_servers_that_sleep_is_refused(model_dir, tmp_path):
    with pytest.raises(ConfigError):
        GRPOTrainer(
            str(model_dir),
            ROWS,
            [Vowels()],
            output={"dir": str(tmp_path / "run")},
            inference={"name": "sglang", "cohost": True, "router": "http://127.0.0.1:9"},
        )


def test_a_critic_trains_beside_a_server_that_sleeps(model_dir, tokenizer, tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr(TorchBackend, "offload", lambda self: moved.append(("leaves", id(self))))
    monkeypatch.setattr(TorchBackend, "onload", lambda self: moved.append(("takes", id(self))))
    with serving(Strict(load_model(model_dir), tokenizer)) as server:
        run = trainer(PPOTrainer, model_dir, tmp_path / "run", server, max_steps=1)
        models = [id(run.trainer.backend), id(run.trainer.critic)]
        run.train()
        assert server.deaths == []
    once = [(what, one) for what in ("takes", "leaves") for one in models]
    assert moved == once * 2  # for the first version, and for the step
