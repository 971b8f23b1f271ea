"""The canary: an engine proves by what it computes that it holds the trainer's weights, or training stops."""

import asyncio
import copy
import math

import pytest
import torch
from fault_server import FaultServer, small_model, write_weights

from rl4llm.backends.models import load_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import EnginesDownError, StaleWeightsError, UnreachableError
from rl4llm.core.types import WeightRef
from rl4llm.inference.fleet import FleetClient
from rl4llm.inference.local import LocalClient
from rl4llm.inference.member import Patience
from rl4llm.inference.sglang import SGLangClient
from rl4llm.inference.transport import Retry
from rl4llm.sync.verify import NOISE, TOLERANCES, Canary

REF = WeightRef(4)


@pytest.fixture
def backend(model):
    return TorchBackend(load_model(model), lr=1e-3)


class Engine(LocalClient):
    """An engine with weights of its own, which are the trainer's until somebody moves them."""

    def __init__(self, model, tokenizer):
        self.model = copy.deepcopy(model)
        super().__init__(self.model, tokenizer)
        asyncio.run(self.load(REF))


@pytest.fixture
def engine(model, tokenizer):
    return Engine(model, tokenizer)


class Several(LocalClient):
    """A client with several engines behind it."""

    parts = ()

    def engines(self):
        return self.parts


def several(model, tokenizer, *parts):
    client = Several(model, tokenizer)
    client.parts = parts
    return client


def canary(client, dtype="float32", **options):
    return Canary(client.vocab_size, dtype=dtype, **options)


def verify(canary, backend, client, weight_ref=REF):
    return asyncio.run(canary.verify(backend, client, weight_ref))


def move(side, by):
    """Every weight of a trainer or an engine by `by`, one up and the next down."""
    with torch.no_grad():
        for parameter in side.model.parameters():
            signs = torch.ones(parameter.numel())
            signs[::2] = -1
            parameter += by * signs.view(parameter.shape)
    if isinstance(side, Engine):
        asyncio.run(side.load(REF))


def test_an_engine_with_the_trainers_weights_is_told_how_far_it_is_off(backend, engine):
    assert verify(canary(engine), backend, engine) < 1e-5


@pytest.mark.parametrize("moved", ["trainer", "engine"])
def test_what_moved_on_one_side_alone_stops_the_run_and_the_message_says_where_which_and_how_far(backend, engine, moved):
    move(backend if moved == "trainer" else engine, 0.02)
    with pytest.raises(StaleWeightsError, match=r"Engine does not hold version 4: .* by \d[\d.]*, more than 0.001"):
        verify(canary(engine), backend, engine)


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
def test_the_tolerance_is_that_of_the_dtype_unless_it_is_given(backend, engine, dtype):
    expected = canary(engine).expected(backend)

    class Off(Engine):
        by = 0.0

        async def score(self, token_ids):
            return [score + self.by for score in await super().score(token_ids)]

    engine.__class__ = Off
    for tolerance in (0.0, 0.7):
        limit = tolerance or TOLERANCES[dtype]
        for sign in (1, -1):
            engine.by = 0.9 * limit * sign
            compare = canary(engine, dtype, tolerance=tolerance).compare
            assert asyncio.run(compare(expected, engine, REF)) == pytest.approx(0.9 * limit, abs=1e-4)
            engine.by = 1.1 * limit * sign
            with pytest.raises(StaleWeightsError, match=f"more than {limit:g}"):
                asyncio.run(compare(expected, engine, REF))


@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_single_token_that_is_off_is_enough(backend, engine, place):
    class Off(Engine):
        async def score(self, token_ids):
            scores = await super().score(token_ids)
            scores[place] += 1.1 * TOLERANCES["float32"]
            return scores

    engine.__class__ = Off
    with pytest.raises(StaleWeightsError, match=r"more than 0\.001"):
        verify(canary(engine), backend, engine)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_are_beyond_every_tolerance(backend, engine, value):
    class Broken(Engine):
        async def score(self, token_ids):
            return [*(await super().score(token_ids))[:-1], value]

    engine.__class__ = Broken
    with pytest.raises(StaleWeightsError):
        verify(canary(engine, tolerance=1e9), backend, engine)


@pytest.mark.parametrize("version", [3, 5, -1])
def test_right_weights_under_another_version_are_not_the_ones_that_were_published(backend, engine, version):
    asyncio.run(engine.load(WeightRef(version)))
    with pytest.raises(StaleWeightsError, match=f"reports version {version} after version 4 was published"):
        verify(canary(engine), backend, engine)


def test_every_engine_is_asked_and_one_that_is_stale_is_enough(backend, engine, model, tokenizer):
    stale = Engine(model, tokenizer)
    assert verify(canary(engine), backend, several(model, tokenizer, engine, stale, engine)) < 1e-5
    move(stale, 0.02)
    for parts in ((stale, engine), (engine, engine, stale)):
        with pytest.raises(StaleWeightsError):
            verify(canary(engine), backend, several(model, tokenizer, *parts))


def test_an_engine_that_is_gone_is_left_to_the_fleet_while_another_answers(backend, engine, model, tokenizer):
    class Gone(Engine):
        async def version(self):
            raise UnreachableError("nobody there")

    gone = Gone(model, tokenizer)
    assert verify(canary(engine), backend, several(model, tokenizer, gone, engine)) < 1e-5
    move(engine, 0.02)
    with pytest.raises(StaleWeightsError):
        verify(canary(engine), backend, several(model, tokenizer, gone, engine))


def test_without_an_answer_nothing_is_proven(backend, engine, model, tokenizer):
    class Silent(Engine):
        async def score(self, token_ids):
            raise UnreachableError("the server did not score all tokens")

    silent = Silent(model, tokenizer)
    with pytest.raises(UnreachableError, match=r"could not be asked whether it holds version 4.*did not score"):
        verify(canary(engine), backend, silent)
    with pytest.raises(UnreachableError, match="could not be asked whether it holds version 4"):
        verify(canary(engine), backend, several(model, tokenizer))


@pytest.mark.parametrize("dtype", sorted(NOISE))
def test_steps_that_are_each_too_small_to_show_add_up_until_a_kept_version_is_noticed(
    backend, engine, dtype, monkeypatch
):
    """An engine that kept its weights for good stays within the tolerance for long."""
    monkeypatch.setitem(NOISE, dtype, max(NOISE[dtype], 5e-6))  # above this small model's rounding, which is 2e-6
    seen, probe = canary(engine, dtype, tolerance=1e9), canary(engine)
    verify(seen, backend, engine)
    at_first = before = probe.expected(backend)
    for _ in range(100):
        move(backend, NOISE[dtype] / 100)
        now = probe.expected(backend)
        assert (now - before).abs().max() < NOISE[dtype]
        if (now - at_first).abs().max() > NOISE[dtype]:
            break
        verify(seen, backend, engine)
        before = now
    with pytest.raises(StaleWeightsError, match="still holds the weights before version 4"):
        verify(seen, backend, engine)


def test_an_engine_that_follows_small_steps_is_not_accused_of_keeping_its_weights(backend, engine):
    seen = canary(engine)
    for _ in range(20):
        verify(seen, backend, engine)
        for side in (backend, engine):
            move(side, 1e-5)
    verify(seen, backend, engine)


@pytest.fixture
def play(tokenizer, tmp_path):
    """Runs `story(server, fleet, backend, version 1)` with one server in a fleet."""

    def run(story, **patience):
        async def main():
            server = FaultServer(small_model(tokenizer), tokenizer)
            await server.start()
            weights = write_weights(tmp_path, tokenizer, [1])
            client = SGLangClient(server.url, tokenizer, vocab_size=len(tokenizer), context_length=128)
            client.retry = Retry(2, first_wait_s=0.001)
            rest = Retry(first_wait_s=0.02, longest_wait_s=0.05)
            fleet = FleetClient([client], patience=Patience(rest=rest, **patience), warn=lambda line: None)
            trained = TorchBackend(load_model(str(tmp_path / "v1")), lr=1e-3)
            try:
                async with asyncio.timeout(30):
                    return await story(server, fleet, trained, weights[1])
            finally:
                await fleet.close()
                await server.stop()

        return asyncio.run(main())

    return run


def test_when_the_last_server_dies_after_the_load_the_proof_waits_for_it(play):
    async def story(server, fleet, backend, weight_ref):
        await fleet.load(weight_ref)
        server.kill()
        proof = asyncio.create_task(canary(fleet).verify(backend, fleet, weight_ref))
        while fleet.engines():
            await asyncio.sleep(0.01)
        await server.start()
        assert await proof < 1e-4
        assert server.weight_version == "1"

    play(story)


def test_when_no_server_is_left_and_none_comes_the_run_can_be_resumed_later(play):
    async def story(server, fleet, backend, weight_ref):
        await fleet.load(weight_ref)
        server.kill()
        with pytest.raises(EnginesDownError):
            await canary(fleet).verify(backend, fleet, weight_ref)
        assert not fleet.engines()
        with pytest.raises(EnginesDownError):  # also when it was out before the proof began
            await canary(fleet).verify(backend, fleet, weight_ref)

    play(story, all_down_limit_s=0.2)
