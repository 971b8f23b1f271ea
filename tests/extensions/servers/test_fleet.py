"""Several servers as one client, whatever happens to them: no sample is lost, doubled, or drawn from other weights."""

import asyncio
import contextlib
import socket
import time
from dataclasses import replace

import pytest
from fault_server import (
    FaultServer,
    Router,
    client_of,
    done_but_damaged,
    edited,
    half_body,
    kill,
    lie,
    reset,
    slow,
    small_model,
    status,
    text,
    twice,
    write_weights,
)

from rl4llm.config import Config
from rl4llm.core.errors import (
    ConfigError,
    EngineError,
    EnginesDownError,
    RefusedError,
    StaleWeightsError,
    UnreachableError,
)
from rl4llm.core.tables import ENGINES
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import TensorSpec
from rl4llm.extensions.servers.clients.vllm import VLLMClient
from rl4llm.extensions.servers.fleet.build import build_fleet
from rl4llm.extensions.servers.fleet.fleet import FleetClient
from rl4llm.extensions.servers.fleet.member import FleetLimits
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.runtime.seeds import derive_seed
from rl4llm.runtime.transport import Retry

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
NIMBLE = Retry(attempts=6, first_wait_s=0.01, longest_wait_s=0.2)
LIMITS = {
    "check_every_s": 0.05, "check_deadline_s": 5.0, "rest": Retry(first_wait_s=0.01, longest_wait_s=0.05),
    "warn_every_s": 0.1, "all_down_limit_s": 60.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tokenizer):
    return small_model(tokenizer)


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights"), tokenizer, [1, 2, 3])


class Scene:
    """Servers, the fleet in front of them, and what the fleet warned of."""

    def __init__(self, servers, fleet, lines, router):
        self.servers, self.fleet, self.lines, self.router = servers, fleet, lines, router

    @property
    def rids(self):
        return [rid for server in self.servers for rid in server.rids]

    @property
    def total(self):
        return sum(server.calls["/generate"] for server in self.servers)

    def pool(self):
        return [client.base_url for client in self.fleet.engines()]

    async def until(self, holds):
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.01)

    async def is_back(self, server):
        await self.until(lambda: server.url in self.pool())


@pytest.fixture
def play(base, tokenizer, weights):
    """Run `story(scene)` on a fleet whose servers hold version 1."""

    def run(story, count=2, *, router=False, load=True, retry=NIMBLE, deadline_s=600.0, **limits):
        def client(url, retry=None):
            return client_of(url, tokenizer, retry, deadline_s=deadline_s, admin_deadline_s=10.0)

        async def main():
            servers = [FaultServer(base, tokenizer) for _ in range(count)]
            await asyncio.gather(*(server.start() for server in servers))
            front = Router(servers) if router else None
            if front:
                await front.start()
            lines = []
            again = Retry(3, first_wait_s=0.01, longest_wait_s=0.1)
            fleet = FleetClient(
                [client(server.url, again) for server in servers],
                router=client(front.url) if front else None,
                retry=retry,
                limits=FleetLimits(**{**LIMITS, **limits}),
                warn=lines.append,
            )
            try:
                if load:
                    await fleet.load(weights[1])
                async with asyncio.timeout(20):
                    return await story(Scene(servers, fleet, lines, front))
            finally:
                await fleet.close()
                await asyncio.gather(*(server.stop() for server in (*servers, *([front] if front else []))))

        return asyncio.run(main())

    return run


async def episode(fleet, prompt, sample, turns=2):
    session, ids, found = f"1/p{prompt}/{sample}", [prompt + 3, 5, 6], []
    await fleet.expect(session)
    try:
        for turn in range(turns):
            seed = derive_seed(prompt, sample, turn)
            found.append(await fleet.generate(ids, PARAMS.replace(seed=seed), session=session))
            ids = [*ids, *found[-1].token_ids, 4]
    finally:
        await fleet.release(session)
    return found


async def rollout(fleet, prompts=16, group=8, turns=2):
    """Return the replies of all samples, by prompt and sample."""
    samples = [(prompt, sample) for prompt in range(prompts) for sample in range(group)]
    found = await asyncio.gather(*(episode(fleet, *sample, turns) for sample in samples))
    return dict(zip(samples, found, strict=True))


def assert_same(found, expected):
    assert found.keys() <= expected.keys()
    for sample, completions in found.items():
        for one, other in zip(completions, expected[sample], strict=True):
            assert one.token_ids == other.token_ids, sample
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert (one.text, one.finish_reason, one.version) == (
                other.text,
                other.finish_reason,
                other.version,
            )


@pytest.fixture(scope="module")
def undisturbed(base, tokenizer, weights):
    """Return the rollout on one server without any fault."""

    async def main():
        server = FaultServer(base, tokenizer)
        await server.start()
        fleet = FleetClient([client_of(server.url, tokenizer)])
        await fleet.load(weights[1])
        try:
            return await rollout(fleet)
        finally:
            await fleet.close()
            await server.stop()

    return asyncio.run(main())


def is_clean(fleet):
    """Return whether requests that ended left nothing behind."""
    members = [*fleet._servers, *([fleet._router] if fleet._router else [])]
    return (
        not fleet._names.turns
        and not fleet._homes.of
        and not any(member._under_way or member.load for member in members)
    )


def test_the_fleet_measures_how_long_servers_wait(play):
    async def story(scene):
        scene.fleet.metrics()
        await asyncio.sleep(0.3)
        assert scene.fleet.metrics()["fleet/idle"] == pytest.approx(1.0, abs=0.01)
        begun = time.monotonic()
        await rollout(scene.fleet, prompts=6)
        played_s = time.monotonic() - begun
        busy = 1 - scene.fleet.metrics()["fleet/idle"]
        assert 0.3 < busy <= 1.0
        await asyncio.sleep(played_s)
        assert scene.fleet.metrics()["fleet/idle"] == pytest.approx(1.0, abs=0.01)

    play(story, 2)


def test_a_killed_server_comes_back_with_the_right_weights_only(play, undisturbed, weights):
    async def story(scene):
        dead, alive = scene.servers
        dead.next("/generate", *[None] * 5, kill())
        assert_same(await rollout(scene.fleet, prompts=6), undisturbed)
        assert scene.pool() == [alive.url]
        assert scene.fleet.metrics()["fleet/moved"] > 0
        await dead.start()
        assert dead.weight_version == "default"
        await scene.is_back(dead)
        assert dead.weight_version == "1"
        digests = [await engine.checksum() for engine in scene.fleet.engines()]
        assert len(digests) == 2
        assert len(set(digests)) == 1
        before = len(dead.rids)
        assert_same(await rollout(scene.fleet), undisturbed)
        assert len(dead.rids) > before

    play(story)


def test_turns_of_a_server_that_hangs_move_before_their_deadline(play, undisturbed):
    async def story(scene):
        silent, alive = scene.servers
        silent.next("/health", *[None] * silent.calls["/health"])
        playing = asyncio.create_task(rollout(scene.fleet, prompts=6))
        await scene.until(lambda: silent.calls["/generate"] >= 3)
        silent.partitioned = True
        assert_same(await playing, undisturbed)
        assert scene.pool() == [alive.url]
        silent.partitioned = False
        await scene.is_back(silent)

    play(story, check_deadline_s=0.5)


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503])
def test_what_may_pass_is_tried_at_another_server_first(play, code):
    async def story(scene):
        for server in scene.servers:
            server.next("/generate", status(code))
        await scene.fleet.generate(PROMPT, PARAMS)
        asked = [server.calls["/generate"] for server in scene.servers]
        assert sorted(asked) == [1, 1, 2]  # each once, then the first that works again
        assert len(scene.pool()) == 3

    play(story, 3)


def test_a_busy_server_gets_time_and_stays_in_the_pool(play):
    async def story(scene):
        busy, free = scene.servers
        busy.next("/generate", *[status(429, retry_after=30)] * 20)
        free.next("/generate", *[status(503, retry_after=0.05)] * 1)
        await asyncio.gather(*(episode(scene.fleet, prompt, 0) for prompt in range(8)))
        refused = busy.calls["/generate"]
        await scene.fleet.generate(PROMPT, PARAMS)
        assert busy.calls["/generate"] == refused
        assert len(scene.pool()) == 2

    play(story, retry=Retry(attempts=12, first_wait_s=0.01, longest_wait_s=20.0))


@pytest.mark.parametrize("router", [False, True])
def test_a_refused_request_is_asked_of_no_other_server(play, router):
    async def story(scene):
        for server in scene.servers:
            server.next("/generate", *[status(400, text="top_p")] * 2)
        with pytest.raises(RefusedError):
            await episode(scene.fleet, 0, 3)
        assert scene.total == 1 + router  # what a router refuses is asked of a server
        assert len(scene.pool()) == 2
        assert is_clean(scene.fleet)

    play(story, router=router)


def test_attempts_are_bounded(play):
    async def story(scene):
        for server in scene.servers:
            server.next("/generate", *[status(500)] * 20)
        with pytest.raises(UnreachableError):
            await scene.fleet.generate(PROMPT, PARAMS)
        assert scene.total == NIMBLE.attempts

    play(story, failures_in_a_row=100)


def test_a_server_with_invalid_replies_leaves_the_pool(play, undisturbed):
    async def story(scene):
        mad, sane = scene.servers
        mad.next("/generate", *[text("{}")] * 3)
        mad.next("/health", *[status(500)] * 10_000)
        assert_same(await rollout(scene.fleet, prompts=6), undisturbed)
        assert scene.pool() == [sane.url]
        assert any("leaves the pool" in line for line in scene.lines)

    play(story, check_every_s=1000.0)


def test_nan_log_probs_have_the_weights_checked_and_reloaded(play, undisturbed):
    async def story(scene):
        sick, _ = scene.servers
        sick.damage(float("nan"))
        assert_same(await rollout(scene.fleet, prompts=6), undisturbed)
        await scene.is_back(sick)
        assert sick.calls["/update_weights_from_disk"] == 2
        assert len({await engine.checksum() for engine in scene.fleet.engines()}) == 1
        assert_same(await rollout(scene.fleet), undisturbed)

    play(story, check_every_s=1000.0)


def test_a_server_with_the_right_weights_returns_without_a_load(play):
    async def story(scene):
        sound, _ = scene.servers
        null = edited(lambda answer: answer["meta_info"].update(output_token_logprobs=None))
        for server in scene.servers:
            server.next("/generate", null)
        await scene.fleet.generate(PROMPT, PARAMS)
        await scene.is_back(sound)
        assert [server.calls["/update_weights_from_disk"] for server in scene.servers] == [1, 1]
        assert scene.fleet.metrics()["fleet/came_back"] >= 1

    play(story)


def test_a_result_that_comes_twice_counts_once(play, undisturbed):
    async def story(scene):
        (server,) = scene.servers
        server.next(
            "/generate",
            edited(lambda answer: answer["meta_info"].update(id="1/p0/0/t0/x-1/a0")),
            None,
            twice(),
        )
        assert_same(await rollout(scene.fleet, prompts=1), undisturbed)
        assert scene.fleet.metrics()["fleet/doubles"] >= 1

    play(story, 1)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_servers_stop_at_all_end_tokens_of_the_model(model, tokenizer, name):
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 9, 10]
    config = replace(Config(), inference={"name": name, "url": "http://127.0.0.1:1"})
    (client,) = build_fleet(config, ENGINES[name], model, tokenizer).engines()
    assert client._ends == (tokenizer.eos_token_id, 9, 10)


def test_a_server_whose_name_is_unknown_is_refused(model, tokenizer, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    config = replace(Config(), inference={"name": "sglang", "url": "http://no-such-server.invalid:30000"})
    with pytest.raises(ConfigError, match="Check the host name"):
        build_fleet(config, ENGINES["sglang"], model, tokenizer)


def test_a_fleet_without_servers_warns_until_the_run_stops(play):
    async def story(scene):
        for server in scene.servers:
            server.kill()
        with pytest.raises(EnginesDownError):
            await rollout(scene.fleet, prompts=2)
        waiting = [line for line in scene.lines if line.startswith("No server can serve")]
        assert 2 <= len(waiting) <= 6  # however many requests wait
        assert "Start one with `rl4llm serve`, or set inference.wait_s" in waiting[0]
        assert is_clean(scene.fleet)

    play(story, all_down_limit_s=0.5)


def test_a_rollout_continues_when_the_servers_are_back(play, undisturbed):
    async def story(scene):
        for server in scene.servers:
            server.next("/generate", *[None] * 3, kill())
        playing = asyncio.create_task(rollout(scene.fleet, prompts=4))
        await scene.until(lambda: any("No server can serve" in line for line in scene.lines))
        await scene.servers[0].start()
        assert_same(await playing, undisturbed)

    play(story)


def test_requests_bypass_a_router_only_while_it_is_down(play, undisturbed):
    async def story(scene):
        checks = scene.router.calls["/health"]
        await scene.until(lambda: scene.router.calls["/health"] > checks + 2)
        assert_same(await rollout(scene.fleet, prompts=2), undisturbed)
        assert scene.router.calls["/generate"] == scene.total == 32
        assert scene.lines == []
        await scene.router.stop()
        assert_same(await rollout(scene.fleet, prompts=2), undisturbed)
        assert scene.router.calls["/generate"] == 32
        await scene.router.start()
        await scene.until(lambda: "is back" in scene.lines[-1])
        assert_same(await rollout(scene.fleet, prompts=2), undisturbed)
        assert scene.router.calls["/generate"] == 64

    play(story, router=True)


def test_an_id_that_a_router_sent_twice_is_sent_under_another(play, undisturbed):
    async def story(scene):
        for server in scene.servers:
            # the router comes back to the first of them, which refuses
            server.next("/generate", reset(after=True))
        assert_same(await rollout(scene.fleet, prompts=1, group=1), undisturbed)
        assert scene.router.calls["/generate"] == 2
        assert any(server.calls["/generate"] > len(server.rids) for server in scene.servers)
        assert len(scene.pool()) == 2

    play(story, router=True)


def test_a_stale_server_behind_a_router_cannot_slip_in_a_sample(play, undisturbed):
    async def story(scene):
        stale, _ = scene.servers
        stale.kill()
        await stale.stop()
        await stale.start()
        assert_same(await rollout(scene.fleet, prompts=2), undisturbed)
        assert stale.calls["/generate"] > 0

    play(story, router=True, check_every_s=1000.0)


def test_damaged_weights_behind_a_router_are_reloaded(play, undisturbed):
    async def story(scene):
        sick, _ = scene.servers
        sick.damage(float("nan"))
        assert_same(await rollout(scene.fleet, prompts=2), undisturbed)
        await scene.until(lambda: sick.calls["/update_weights_from_disk"] == 2)
        await scene.is_back(sick)
        assert scene.fleet.metrics()["fleet/left"] == 1

    retry = Retry(attempts=30, first_wait_s=0.01, longest_wait_s=0.05)
    play(story, router=True, check_every_s=1000.0, retry=retry)


def test_a_restart_with_other_weights_gives_no_sample(play, undisturbed):
    async def story(scene):
        for server in scene.servers:
            await server.stop()
            await server.start()
        assert_same(await rollout(scene.fleet, prompts=4), undisturbed)
        await scene.until(lambda: len(scene.pool()) == 2)
        assert [server.weight_version for server in scene.servers] == ["1", "1"]

    play(story, check_every_s=1000.0)


def test_a_restarted_server_is_found_by_its_version(play):
    async def story(scene):
        quiet = scene.servers[0]
        await quiet.stop()
        await quiet.start()
        await scene.until(lambda: scene.fleet.metrics()["fleet/came_back"] == 1)
        assert quiet.weight_version == "1"
        assert any("leaves the pool" in line for line in scene.lines)

    play(story)


def test_tokens_during_an_update_carry_their_own_version(play, weights):
    async def story(scene):
        playing = asyncio.create_task(rollout(scene.fleet, prompts=2, turns=12))
        await scene.until(lambda: scene.total > 20)
        await scene.fleet.load(weights[2])
        found = [completion for completions in (await playing).values() for completion in completions]
        assert {completion.version for completion in found} == {1, 2}
        assert await scene.fleet.version() == 2
        assert not any(server.paused for server in scene.servers)

    play(story)


@pytest.mark.parametrize("fault", [status(400), status(500), lie(), reset(), kill()])
def test_a_server_that_fails_an_update_leaves_the_pool(play, weights, fault):
    async def story(scene):
        failing = scene.servers[1]
        failing.next("/update_weights_from_disk", fault)
        await scene.fleet.load(weights[2])
        assert failing.url not in scene.pool()
        assert len(scene.pool()) == 2
        assert not (failing.running and failing.paused)
        found = await rollout(scene.fleet, prompts=2)
        assert {completion.version for completions in found.values() for completion in completions} == {2}
        if not failing.running:
            await failing.start()
        await scene.is_back(failing)
        assert failing.weight_version == "2"
        assert await scene.fleet.version() == 2

    play(story, 3)


def test_a_server_with_differing_weights_leaves_and_reloads(play, weights):
    async def story(scene):
        odd = scene.servers[2]
        odd.next("/update_weights_from_disk", done_but_damaged())
        await scene.fleet.load(weights[2])
        assert odd.url not in scene.pool()
        await scene.is_back(odd)
        assert len({await engine.checksum() for engine in scene.fleet.engines()}) == 1

    play(story, 3)


def test_servers_that_disagree_with_no_majority_stop_the_run(play, weights):
    async def story(scene):
        scene.servers[0].next("/update_weights_from_disk", done_but_damaged())
        with pytest.raises(StaleWeightsError):
            await scene.fleet.load(weights[2])

    play(story)


def test_a_version_that_no_server_takes_is_an_error(play, weights):
    async def story(scene):
        for server in scene.servers:
            server.next("/update_weights_from_disk", status(400, text="no such file"))
        with pytest.raises(EngineError):
            await scene.fleet.load(weights[2])
        assert not any(server.paused for server in scene.servers)

    play(story, check_every_s=1000.0)


def test_a_publish_waits_for_servers_that_are_all_down(play, weights):
    async def story(scene):
        for server in scene.servers:
            server.kill()
        loading = asyncio.create_task(scene.fleet.load(weights[2]))
        await scene.until(lambda: any("No server can serve" in line for line in scene.lines))
        await scene.servers[1].start()
        await loading
        assert scene.pool() == [scene.servers[1].url]
        assert scene.servers[1].weight_version == "2"

    play(story)


def test_a_server_that_stays_paused_leaves_until_it_is_resumed(play, weights, undisturbed):
    async def story(scene):
        stuck, _ = scene.servers
        stuck.stays_paused = True
        await scene.fleet.load(weights[2])
        await scene.fleet.load(weights[1])
        assert_same(await rollout(scene.fleet, prompts=4), undisturbed)
        assert stuck.url not in scene.pool()
        stuck.stays_paused = False
        await scene.is_back(stuck)
        assert not stuck.paused
        assert_same(await rollout(scene.fleet), undisturbed)

    play(story, check_deadline_s=0.5)


def follower_of(scene, tokenizer, lines, **limits):
    """Return the fleet of another rank, which waits for weights that the first one gives."""
    clients = [client_of(server.url, tokenizer) for server in scene.servers]
    return FleetClient(clients, retry=NIMBLE, limits=FleetLimits(**{**LIMITS, **limits}), warn=lines.append)


def test_a_server_that_is_added_soon_serves_all_ranks(play, weights, tokenizer):
    async def story(scene):
        added, _ = scene.servers
        follower = follower_of(scene, tokenizer, [], rest=FleetLimits().rest)
        await follower.load(replace(weights[1], held=True))
        for boots in (8, 0, 0, 0):  # looks at a server that listens and is not ready yet
            added.kill()
            await scene.until(
                lambda: not any(added.url in pool() for pool in (scene.pool, lambda: urls(follower)))
            )
            await added.start()
            added.next("/health", *[status(503)] * boots)
            await scene.until(lambda boots=boots: added.calls["/health"] >= boots)
            begin = time.monotonic()
            await scene.until(
                lambda: all(added.url in pool() for pool in (scene.pool, lambda: urls(follower)))
            )
            assert time.monotonic() - begin < 2.2  # half a second, where nothing else runs
            await asyncio.sleep(0.1)
        await follower.close()

    play(story, rest=FleetLimits().rest)


def urls(fleet):
    return [client.base_url for client in fleet.engines()]


def test_a_connection_has_a_shorter_deadline_than_an_answer(play):
    async def story(scene):
        away, _ = scene.servers
        away.kill()
        await scene.until(lambda: away.url not in scene.pool())
        with silent(away.port):
            while "within 0.2 s" not in (await scene.fleet.health())["out"].get(away.url, ""):
                await asyncio.sleep(0.05)
        await away.start()
        begin = time.monotonic()
        await scene.is_back(away)
        assert time.monotonic() - begin < 4

    play(story, check_deadline_s=60.0, connect_s=0.2)


@contextlib.contextmanager
def silent(port):
    """Return a port where a connection is neither accepted nor refused, since its queue is full."""
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for _ in range(3):
            caller = sockets.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        yield


@contextlib.asynccontextmanager
async def other_rank(follower, weight_ref):
    """Yield what runs a coroutine in the event loop of another rank, which stands still while that rank trains."""
    runner = asyncio.Runner()

    async def run(coroutine):
        return await asyncio.to_thread(runner.run, coroutine)

    await run(follower.load(replace(weight_ref, held=True)))
    yield run
    await run(follower.close())
    await asyncio.to_thread(runner.close)


def test_a_server_is_not_blamed_for_delays_of_this_process(play, weights, tokenizer):
    async def story(scene):
        lines = []
        follower = follower_of(scene, tokenizer, lines, check_deadline_s=0.3)
        async with other_rank(follower, weights[1]) as run:
            for server in scene.servers:
                server.next("/health", *[slow(0.2)] * 20)
            for _ in range(3):
                await run(asyncio.sleep(0.15))  # long enough to begin a health check, not to end it
                await asyncio.sleep(1.5)
            await run(asyncio.sleep(0.1))
            assert not lines

    play(story)


def test_a_version_published_by_another_rank_is_accepted(play, weights, tokenizer):
    async def story(scene):
        lines = []
        follower = follower_of(scene, tokenizer, lines)
        async with other_rank(follower, weights[1]) as run:
            scene.servers[0].next("/health", *[slow(0.5)] * 20)
            await run(asyncio.sleep(0.2))  # long enough to begin a health check, not to end it
            await scene.fleet.load(weights[2])
            await run(follower.load(replace(weights[2], held=True)))
            assert not lines
            assert (await run(follower.generate(PROMPT, PARAMS))).version == 2

    play(story, count=1)


def test_a_version_is_not_deleted_while_a_slow_server_loads_it(play, base, tmp_path):
    async def story(scene):
        store = WeightStore(tmp_path, keep=1)
        named = dict(base.named_parameters())

        def write(version):
            return store.write(version, [TensorSpec.of(*item) for item in named.items()], iter(named.items()))

        weight_ref = write(1)
        scene.servers[0].next("/update_weights_from_disk", slow(0.3))
        with store.lease(1):
            loading = asyncio.create_task(scene.fleet.load(weight_ref))
            await scene.until(lambda: scene.servers[1].weight_version == "1")
            for version in (2, 3, 4):
                write(version)
            await loading
        assert [server.weight_version for server in scene.servers] == ["1", "1"]
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["LATEST", "v000004"]

    play(story, load=False)


def test_a_partition_heals_and_a_missed_update_is_made_up_for(play, weights):
    async def story(scene):
        away, _ = scene.servers
        await rollout(scene.fleet, prompts=2)
        away.partitioned = True
        await scene.until(lambda: away.url not in scene.pool())
        await scene.fleet.load(weights[2])
        found = await rollout(scene.fleet, prompts=2)
        assert {completion.version for completions in found.values() for completion in completions} == {2}
        assert away.weight_version == "1"
        away.partitioned = False
        await scene.is_back(away)
        assert away.weight_version == "2"

    play(story, check_deadline_s=0.3)


def test_a_storm_of_faults_leaves_nothing_behind(play):
    async def story(scene):
        faults = [status(500), reset(), half_body(), text("{"), status(429, retry_after=0.01), status(408)]
        for place, server in enumerate(scene.servers):
            server.at("/generate", {number: faults[number % len(faults)] for number in range(place, 4000, 5)})
        short = PARAMS.replace(max_tokens=1)
        gate = asyncio.Semaphore(64)

        async def one(number):
            session = f"1/p{number // 8}/{number % 8}"
            async with gate:
                await scene.fleet.generate(PROMPT, short.replace(seed=number), session=session)
            await scene.fleet.release(session)

        await asyncio.gather(*(one(number) for number in range(2000)))
        assert is_clean(scene.fleet)
        assert len(set(scene.rids)) == len(scene.rids) >= 2000
        assert scene.fleet.metrics()["fleet/retries"] >= 400
        await scene.until(lambda: all(len(server.connections()) <= 65 for server in scene.servers))

    play(story, 2, failures_in_a_row=20, retry=Retry(attempts=30, first_wait_s=0.001, longest_wait_s=0.05))


def test_a_cancelled_rollout_leaves_nothing_running(play):
    async def story(scene):
        before = len(asyncio.all_tasks())
        playing = asyncio.create_task(rollout(scene.fleet, prompts=4))
        await scene.until(lambda: scene.total > 10)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        for server in scene.servers:
            while await server.busy():
                await asyncio.sleep(0.01)
        assert is_clean(scene.fleet)
        await scene.until(lambda: len(asyncio.all_tasks()) <= before + 8)  # the servers' own connections

    play(story)


def test_an_aborted_turn_restarts_on_another_server(play, undisturbed):
    def aborted(answer):
        info = answer["meta_info"]
        rows = info["output_token_logprobs"][:3]
        info.update(finish_reason={"type": "abort"}, output_token_logprobs=rows)
        return {**answer, "output_ids": answer["output_ids"][:3]}

    async def story(scene):
        for server in scene.servers:
            server.next("/generate", edited(aborted), None, edited(aborted))
        assert_same(await rollout(scene.fleet, prompts=2), undisturbed)

    play(story)


def test_a_prompts_samples_share_a_server_and_all_servers_work(play):
    async def story(scene):
        await rollout(scene.fleet, prompts=24)
        where = {}
        for place, server in enumerate(scene.servers):
            for rid in server.rids:
                where.setdefault(rid.split("/")[1], set()).add(place)
        together = [places for places in where.values() if len(places) == 1]
        assert len(together) >= 12  # the others were split, as their server had more than its share
        shares = [len(server.rids) / (24 * 8 * 2) for server in scene.servers]
        assert all(0.05 < share < 0.5 for share in shares)

    play(story, 3)


def test_a_lost_server_moves_only_its_own_groups(play):
    async def story(scene):
        def homes():
            return {
                f"p{prompt}": scene.fleet._homes._choose(f"1/p{prompt}/0", scene.fleet._upkeep.serving())
                for prompt in range(60)
            }

        before = homes()
        gone = scene.fleet._servers[1]
        scene.servers[1].kill()
        await scene.until(lambda: not gone.up)
        moved = [prompt for prompt, home in homes().items() if home is not before[prompt]]
        assert moved == [prompt for prompt, home in before.items() if home is gone]
        assert 0 < len(moved) < 40

    play(story, 3)


def test_what_is_for_all_servers_reaches_all(play, weights):
    async def story(scene):
        await scene.fleet.pause()
        assert all(server.paused for server in scene.servers)
        await asyncio.sleep(0.2)  # several checks: a pause on purpose is no illness
        assert len(scene.pool()) == 3
        await scene.fleet.resume()
        assert not any(server.paused for server in scene.servers)
        await scene.fleet.sleep()
        asked = [server.calls["/health"] for server in scene.servers]
        await scene.fleet.wake(("weights",))
        await scene.fleet.load(weights[2])
        await asyncio.sleep(0.2)
        assert [server.calls["/health"] for server in scene.servers] == asked  # it would generate a token
        await scene.fleet.wake(("kv_cache",))
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            assert len({server.calls[path] for server in scene.servers}) == 1
        assert (await scene.fleet.health())["out"] == {}
        scores = [await engine.score(PROMPT) for engine in scene.fleet.engines()]
        assert len(scores) == 3
        assert await scene.fleet.score(PROMPT) == pytest.approx(scores[0], abs=1e-5)

    play(story, 3)


def test_health_names_who_is_out_and_why(play):
    async def story(scene):
        scene.servers[0].kill()
        found = await scene.fleet.health()
        assert found["in_pool"] == [scene.servers[1].url]
        assert "annot connect" in found["out"][scene.servers[0].url]
        scene.servers[1].kill()
        with pytest.raises(EngineError):
            await scene.fleet.health()

    play(story)


def test_a_fleet_serves_one_event_loop_after_the_other(base, tokenizer):
    server = FaultServer(base, tokenizer)
    fleet = FleetClient([client_of(server.url, tokenizer)])

    async def main(disconnect):
        await server.start()
        found = await asyncio.gather(
            *(fleet.generate(PROMPT, PARAMS.replace(seed=seed)) for seed in range(3))
        )
        if disconnect:
            await fleet.disconnect()
        await server.stop()
        return found

    assert asyncio.run(main(True)) == asyncio.run(main(False)) == asyncio.run(main(True))


def test_servers_whose_replies_name_no_weights_get_no_router(tokenizer):
    one, front = (
        VLLMClient(f"http://127.0.0.1:{port}", tokenizer, vocab_size=8, context_length=8) for port in (1, 2)
    )
    with pytest.raises(ConfigError):
        FleetClient([one], router=front)
