"""The canary: an engine proves by what it computes that it holds the trainer's weights, or training stops."""

import asyncio
import copy
import math

import pytest
import torch
from fault_server import FaultServer, small_model, write_weights

from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import DivergedError, EnginesDownError, StaleWeightsError, UnreachableError
from rl4llm.core.types import TrainBatch
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.fleet.fleet import FleetClient
from rl4llm.extensions.servers.fleet.member import FleetLimits
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.transport import Retry
from rl4llm.sync.verify import BOUNDS, FLOORS, NOISE, Canary

REF = WeightRef(4)


@pytest.fixture
def backend(model):
    return TorchBackend(load_model(model), lr=1e-3)


class Engine(LocalClient):
    """An engine with separate weights, equal to the trainer's until a test moves them."""

    def __init__(self, model, tokenizer, **options):
        self.model = copy.deepcopy(model)
        super().__init__(self.model, tokenizer, **options)
        asyncio.run(self.load(REF))


@pytest.fixture
def engine(model, tokenizer):
    return Engine(model, tokenizer)


class Off(Engine):
    """An engine, named, whose log-probs are off by `by`: all of them, or one of each sequence."""

    by, place = 0.0, slice(None)

    async def score(self, token_ids):
        scores = torch.tensor(await super().score(token_ids))
        scores[self.place] += self.by
        return scores.tolist()

    def __str__(self):
        return getattr(self, "name", "Engine")


def off(model, tokenizer, name):
    engine = Off(model, tokenizer)
    engine.name = name
    return engine


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
    """Move every weight of a trainer or an engine by `by`, one up and the next down."""
    with torch.no_grad():
        for parameter in side.model.parameters():
            signs = torch.ones(parameter.numel())
            signs[::2] = -1
            parameter += by * signs.view(parameter.shape)
    if isinstance(side, Engine):
        asyncio.run(side.load(REF))


def test_an_engine_with_the_trainers_weights_passes_the_canary(backend, engine):
    assert verify(canary(engine), backend, engine) < 1e-5


@pytest.mark.parametrize("moved", ["trainer", "engine"])
def test_weights_that_move_on_one_side_only_stop_the_run(backend, engine, moved):
    move(backend if moved == "trainer" else engine, 0.02)
    with pytest.raises(
        StaleWeightsError,
        match=r"Engine does not hold version 4: .* by \d[\d.]* nats on average, more than 0.001",
    ):
        verify(canary(engine), backend, engine)


@pytest.mark.parametrize("dtype", sorted(BOUNDS))
def test_the_bound_is_that_of_the_dtype_unless_it_is_given(backend, engine, dtype):
    expected = canary(engine).expected(backend)
    engine.__class__ = Off
    for tolerance in (0.0, 0.7):
        limit = tolerance or BOUNDS[dtype]
        for sign in (1, -1):
            engine.by = 0.9 * limit * sign
            compare = canary(engine, dtype, tolerance=tolerance).compare
            assert asyncio.run(compare(expected, engine, REF)) == pytest.approx(0.9 * limit, abs=1e-4)
            engine.by = 1.1 * limit * sign
            with pytest.raises(StaleWeightsError, match=f"more than {limit:g}"):
                asyncio.run(compare(expected, engine, REF))


@pytest.mark.parametrize("dtype", sorted(BOUNDS))
def test_after_the_first_comparison_the_tolerance_is_tight(backend, engine, dtype):
    """What the bound accepts at first is refused later, unless the first difference was as large."""
    engine.__class__ = Off
    for first in (0.0, 0.2 * BOUNDS[dtype]):
        seen, engine.by = canary(engine, dtype), first
        verify(seen, backend, engine)
        limit = 3 * max(first, FLOORS[dtype])
        assert limit < 0.7 * BOUNDS[dtype]
        engine.by = 0.95 * limit
        assert verify(seen, backend, engine) == pytest.approx(0.95 * limit, rel=0.02)
        engine.by = 1.05 * limit
        with pytest.raises(StaleWeightsError):
            verify(seen, backend, engine)
        assert verify(canary(engine, dtype), backend, engine) < BOUNDS[dtype]


def test_a_given_tolerance_is_not_calibrated(backend, engine):
    seen, engine.__class__ = canary(engine, tolerance=0.7), Off
    verify(seen, backend, engine)
    engine.by = 0.6
    assert verify(seen, backend, engine) == pytest.approx(0.6, rel=1e-3)


@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_single_token_that_is_off_is_enough(backend, engine, place):
    seen, engine.__class__ = canary(engine), Off
    verify(seen, backend, engine)
    engine.by, engine.place = 1.1 * 23 * 3 * FLOORS["float32"], place
    assert engine.by < BOUNDS["float32"]
    with pytest.raises(StaleWeightsError):
        verify(seen, backend, engine)


def test_an_engine_that_joins_later_is_not_calibrated(backend, model, tokenizer):
    """Its weights may be old by then: it may differ by as much as the worst of the others, not by as much as it does."""
    first, second, late = (off(model, tokenizer, name) for name in ("first", "second", "late"))
    seen = canary(first)
    first.by, second.by = 4e-5, 2e-5
    verify(seen, backend, several(model, tokenizer, first, second))
    late.by = 1.1e-4
    for _ in range(2):
        verify(seen, backend, several(model, tokenizer, first, second, late))
    late.by = 1.3e-4
    with pytest.raises(StaleWeightsError, match=r"late does not hold version 4: .* more than 0\.00012"):
        verify(seen, backend, several(model, tokenizer, first, second, late))
    late.by, second.by = 0.0, 1.1e-4  # each engine has a tolerance of its own
    with pytest.raises(StaleWeightsError, match=r"second does not hold version 4: .* more than 6[.\d]*e-05"):
        verify(seen, backend, several(model, tokenizer, first, second, late))


def test_the_tolerance_follows_how_likely_the_tokens_are(engine):
    """Rounding shows in a log-prob as far as other tokens are probable."""
    seen, engine.__class__ = canary(engine, "bfloat16"), Off

    def likely(probability):
        return torch.full((2, 23), math.log(probability))

    async def scores(token_ids):
        return [math.log(0.5) + 0.02] * 23

    engine.score = scores
    asyncio.run(seen.compare(likely(0.5), engine, REF))
    for probability, limit in ((0.5, 0.06), (0.25, 0.09), (1e-6, 0.12), (0.7, 0.036), (0.99, 0.012)):
        assert seen.tolerance(engine, likely(probability)) == pytest.approx(limit, rel=1e-4)


def test_a_policy_that_leaps_diverges_a_left_engine_is_stale(backend, engine):
    seen = canary(engine)
    verify(seen, backend, engine)
    start = seen.expected(backend)
    cases = (
        (9.0, 1e-3, DivergedError),  # what rounding adds where logits are large
        (9.0, 0.2, StaleWeightsError),  # a part of the weights did not follow
        (0.5, 1e-3, StaleWeightsError),
    )
    for leap, apart, error in cases:
        expected_BT = start - leap

        async def scores(token_ids, scored_BT=expected_BT + apart):
            return scored_BT[seen.token_ids_BT.tolist().index(token_ids)].tolist()

        engine.score = scores
        with pytest.raises(error):
            asyncio.run(seen.compare(expected_BT, engine, REF))
    del engine.score  # it has the weights before
    with pytest.raises(StaleWeightsError):
        asyncio.run(seen.compare(start - 9.0, engine, REF))


def test_a_policy_without_finite_log_probs_reaches_no_engine(backend, engine):
    next(iter(backend.model.parameters())).data.fill_(math.nan)
    with pytest.raises(DivergedError):
        verify(canary(engine), backend, engine)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_numbers_exceed_every_tolerance(backend, engine, value):
    class Broken(Engine):
        async def score(self, token_ids):
            return [*(await super().score(token_ids))[:-1], value]

    engine.__class__ = Broken
    with pytest.raises(StaleWeightsError):
        verify(canary(engine, tolerance=1e9), backend, engine)


@pytest.mark.parametrize("version", [3, 5, -1])
def test_right_weights_under_another_version_are_refused(backend, engine, version):
    asyncio.run(engine.load(WeightRef(version)))
    with pytest.raises(StaleWeightsError):
        verify(canary(engine), backend, engine)


def test_every_engine_is_asked_and_one_that_is_stale_is_enough(backend, engine, model, tokenizer):
    stale = Engine(model, tokenizer)
    assert verify(canary(engine), backend, several(model, tokenizer, engine, stale, engine)) < 1e-5
    move(stale, 0.02)
    for parts in ((stale, engine), (engine, engine, stale)):
        with pytest.raises(StaleWeightsError):
            verify(canary(engine), backend, several(model, tokenizer, *parts))


def test_the_canary_ignores_a_lost_engine_if_another_answers(backend, engine, model, tokenizer):
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
    with pytest.raises(UnreachableError):
        verify(canary(engine), backend, silent)
    with pytest.raises(UnreachableError):
        verify(canary(engine), backend, several(model, tokenizer))


@pytest.mark.parametrize("dtype", sorted(NOISE))
def test_small_steps_add_up_until_kept_weights_are_noticed(backend, engine, dtype, monkeypatch):
    """An engine that never takes new weights stays within the tolerance for many steps."""
    # above this small model's rounding, which is 2e-6
    monkeypatch.setitem(NOISE, dtype, max(NOISE[dtype], 5e-6))
    seen, probe = canary(engine, dtype, tolerance=1e9), canary(engine)
    verify(seen, backend, engine)
    at_first = before = probe.expected(backend)
    for _ in range(100):
        move(backend, NOISE[dtype] / 100)
        now = probe.expected(backend)
        assert (now - before).abs().mean() < NOISE[dtype]
        if (now - at_first).abs().mean() > NOISE[dtype]:
            break
        verify(seen, backend, engine)
        before = now
    with pytest.raises(StaleWeightsError):
        verify(seen, backend, engine)


def test_an_engine_that_follows_small_steps_passes(backend, engine):
    seen = canary(engine)
    for _ in range(20):
        verify(seen, backend, engine)
        for side in (backend, engine):
            move(side, 1e-5)
    verify(seen, backend, engine)


PRECISIONS = {
    "float32": ("float32", "none"),
    "autocast": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "none"),
}


class Deep:
    """A trainer and an engine with separate, equal weights: 30 layers and large logits, so that rounding shows."""

    def __init__(self, tokenizer, precision):
        self.dtype, autocast = PRECISIONS[precision]
        self.dtype_of_canary = "float32" if precision == "float32" else "bfloat16"
        model = build_model(tokenizer, seed=0, hidden_size=64, num_layers=30).eval()
        with torch.no_grad():
            model.model.norm.weight *= 20
        self.backend = TorchBackend(load_model(model, self.dtype), lr=1e-5, autocast=autocast)
        self.engine = Engine(self.backend.model, tokenizer, autocast=autocast)
        self.begin()
        self.sampled_ids_BT = asyncio.run(self.canary.sample(self.engine))

    def begin(self):
        """Start with a new canary, whose tokens are random."""
        self.canary = canary(self.engine, self.dtype_of_canary)
        self.random_ids_BT = self.canary.token_ids_BT

    def verify(self):
        return verify(self.canary, self.backend, self.engine)

    def largest_over_random(self):
        """Return the largest difference over the random tokens."""
        expected_BT = self.canary.expected(self.backend)
        self.random_mean = expected_BT.mean()
        scored = [asyncio.run(self.engine.score(row)) for row in self.random_ids_BT.tolist()]
        return (torch.tensor(scored) - expected_BT).abs().max().item()

    def sample(self):
        self.canary.token_ids_BT = self.sampled_ids_BT

    def swap(self, one=10, other=11):
        layers = self.engine.model.model.layers
        layers[one], layers[other] = layers[other], layers[one]
        asyncio.run(self.engine.load(REF))

    def step(self):
        """Take one small optimizer step towards the canary's tokens."""
        ids_BT = self.canary.token_ids_BT
        mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        mask_BT[:, 0] = False
        batch = TrainBatch(
            token_ids_BT=ids_BT,
            position_ids_BT=torch.arange(ids_BT.shape[1]).expand_as(ids_BT),
            segment_ids_BT=torch.ones_like(ids_BT),
            mask_BT=mask_BT,
            sampled_logprobs_BT=torch.zeros(ids_BT.shape),
            credits_BT=torch.zeros(ids_BT.shape),
            weights_BT=mask_BT / mask_BT.sum(),
        )
        self.backend.forward_backward(batch, lambda batch, logprobs_BT, _: (-logprobs_BT, {}))
        self.backend.optim_step()


@pytest.fixture(scope="module", params=PRECISIONS)
def made(tokenizer, request):
    return Deep(tokenizer, request.param)


@pytest.fixture
def deep(made):
    """Return the models of all tests with a new canary; each test ends with equal weights on both sides."""
    made.begin()
    return made


def test_a_deep_model_passes_in_every_precision(deep):
    """The largest difference over random tokens would not: it was the measure before."""
    random = deep.largest_over_random()
    deep.sample()
    assert not torch.equal(deep.canary.token_ids_BT, deep.random_ids_BT)
    expected_BT = deep.canary.expected(deep.backend)
    assert expected_BT.mean() > deep.random_mean + 2  # nats more likely
    assert deep.verify() < 0.1 * deep.canary.bound
    assert deep.verify() < 0.1 * random
    if deep.dtype == "bfloat16":
        assert random > 0.25  # nats, which was the limit


def test_kernels_that_agreed_at_first_may_round_apart_later(deep):
    deep.sample()
    exact = deep.canary.expected(deep.backend).tolist()
    scores = deep.engine.score
    deep.engine.score = lambda ids: asyncio.sleep(0, exact[deep.canary.token_ids_BT.tolist().index(ids)])
    assert deep.verify() == deep.canary.apart == 0.0
    deep.engine.score = scores
    assert deep.verify() == deep.canary.apart


def test_two_swapped_layers_are_found_in_every_precision(deep):
    deep.sample()
    deep.verify()
    deep.swap()
    with pytest.raises(StaleWeightsError):
        deep.verify()
    deep.swap()
    deep.verify()


def test_one_small_step_is_found_in_every_precision(deep):
    deep.sample()
    deep.verify()
    deep.step()
    with pytest.raises(StaleWeightsError):
        deep.verify()
    deep.engine.model.load_state_dict(deep.backend.model.state_dict())
    asyncio.run(deep.engine.load(REF))
    deep.verify()


@pytest.fixture
def play(tokenizer, tmp_path):
    """Run `story(server, fleet, backend, version 1)` with one server in a fleet."""

    def run(story, **limits):
        async def main():
            server = FaultServer(small_model(tokenizer), tokenizer)
            await server.start()
            weights = write_weights(tmp_path, tokenizer, [1])
            client = SGLangClient(server.url, tokenizer, vocab_size=len(tokenizer), context_length=128)
            client.retry = Retry(2, first_wait_s=0.001)
            rest = Retry(first_wait_s=0.02, longest_wait_s=0.05)
            fleet = FleetClient([client], limits=FleetLimits(rest=rest, **limits), warn=lambda line: None)
            trained = TorchBackend(load_model(str(tmp_path / "v1")), lr=1e-3)
            try:
                async with asyncio.timeout(30):
                    return await story(server, fleet, trained, weights[1])
            finally:
                await fleet.close()
                await server.stop()

        return asyncio.run(main())

    return run


def test_the_canary_waits_for_the_last_server_after_a_load(play):
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


def test_a_server_that_a_dead_trainer_left_paused_samples(play):
    async def story(server, fleet, backend, weight_ref):
        await server.engine.pause()
        server.paused = True
        waiting = canary(fleet)
        random_BT = waiting.token_ids_BT
        assert (await waiting.sample(fleet) != random_BT).float().mean() > 0.9
        assert not server.paused

    play(story)


def test_a_run_that_lost_all_servers_can_be_resumed(play):
    async def story(server, fleet, backend, weight_ref):
        await fleet.load(weight_ref)
        server.kill()
        with pytest.raises(EnginesDownError):
            await canary(fleet).verify(backend, fleet, weight_ref)
        assert not fleet.engines()
        with pytest.raises(EnginesDownError):  # also when it was out before the proof began
            await canary(fleet).verify(backend, fleet, weight_ref)

    play(story, all_down_limit_s=0.2)
