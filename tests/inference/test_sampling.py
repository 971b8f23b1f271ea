import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl4llm.core.types import SamplingParams
from rl4llm.inference.embedded import sampling
from rl4llm.inference.embedded.sampling import (
    CANDIDATES,
    LARGE,
    Kind,
    Sampler,
    StaticSampler,
    draw,
    keep_likely,
    uniforms,
)


def one_by_one(seed, token):
    """Compute splitmix64 in plain integers."""

    def mix(state):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        return state ^ (state >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mix((mix(seed % 2**64 ^ golden) + (token + 1) * golden) % 2**64) >> 11) / 2**53


def test_a_tokens_number_depends_on_its_seed_and_index_alone():
    seeds, starts = [0, 1, 2**63 - 1, 5], [0, 3, 100, 0]
    found = uniforms(seeds, starts, 7)
    for row, (seed, start) in enumerate(zip(seeds, starts, strict=True)):
        assert found[:, row].tolist() == [one_by_one(seed, start + place) for place in range(7)]


def test_streams_of_neighbouring_seeds_are_uniform_and_unrelated():
    numbers = uniforms(range(200), [0] * 200, 500)
    assert numbers.min() >= 0 and numbers.max() < 1
    shares = np.histogram(numbers, bins=20, range=(0, 1))[0] / numbers.size
    assert abs(shares - 0.05).max() < 0.003
    assert abs(np.corrcoef(numbers.T)[~np.eye(200, dtype=bool)]).mean() < 0.05
    assert len(np.unique(numbers)) == numbers.size


def test_a_stream_continues_unchanged_when_the_rows_change():
    logits = torch.randn(40, 2, 50)
    params = [SamplingParams(seed=seed) for seed in (3, 4)]
    whole = Sampler(params, [0, 0], torch.device("cpu"))
    expected = [whole(step)[0].tolist() for step in logits]
    second = Sampler(params[1:], [7], torch.device("cpu"))
    assert [second(step[1:])[0].item() for step in logits[7:]] == [tokens[1] for tokens in expected[7:]]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.5), (0, 0.9), (3, 1.0), (5, 0.7), (1, 0.1), (50, 0.999), (0, 1.0)]
)
def test_top_k_and_top_p_keep_what_the_reference_keeps(top_k, top_p, reference_filter):
    probs = (2 * torch.randn(6, 50, dtype=torch.float64)).softmax(-1)
    found = keep_likely(probs, torch.tensor([top_k] * 6), torch.tensor([top_p] * 6, dtype=torch.float64))
    for row in range(6):
        assert found[row].tolist() == reference_filter(
            probs[row].tolist(), SamplingParams(top_k=top_k, top_p=top_p)
        )


def test_tokens_come_as_often_as_the_filtered_softmax_says():
    count = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).expand(count, 5)
    params = [SamplingParams(seed=seed, temperature=0.8, top_p=0.9, top_k=4) for seed in range(count)]
    tokens, logprobs = Sampler(params, [0] * count, torch.device("cpu"))(logits)
    probs = (logits[0] / 0.8).softmax(-1)
    kept = keep_likely(probs[None], torch.tensor([4]), torch.tensor([0.9]))[0]
    shares = torch.bincount(tokens, minlength=5) / count
    assert torch.allclose(shares, kept / kept.sum(), atol=0.012)
    assert torch.allclose(logprobs, probs.log()[tokens], atol=1e-6)


def test_rows_with_different_parameters_do_not_interact():
    logits = 3 * torch.randn(5, 30)
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.0),
        SamplingParams(seed=3, temperature=0.5, top_k=3),
        SamplingParams(seed=4, top_p=0.4),
        SamplingParams(seed=5, temperature=2.0),
    ]
    tokens, logprobs = Sampler(params, [0, 1, 2, 3, 4], torch.device("cpu"))(logits)
    for row, item in enumerate(params):
        alone = Sampler([item], [row], torch.device("cpu"))(logits[row : row + 1])
        assert tokens[row] == alone[0][0]
        assert torch.allclose(logprobs[row], alone[1][0])


def test_nan_logits_give_nan_log_probs():
    logits = torch.randn(2, 10)
    logits[1, 3] = float("nan")
    _, logprobs = Sampler([SamplingParams()] * 2, [0, 0], torch.device("cpu"))(logits)
    assert logprobs.isnan().tolist() == [False, True]


@pytest.mark.parametrize("vocabulary", [49152, 151936, LARGE + 1])  # slices of 256 and 128 tokens, and none
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_slices_draw_what_the_whole_vocabulary_draws(vocabulary, spread):
    torch.manual_seed(0)
    weights = (torch.randn(64, vocabulary) * spread).softmax(-1)
    weights[:, torch.rand(vocabulary) < 0.99] = 0.0
    weights[0], weights[1, :-1] = float("nan"), 0.0
    weights[1, -1] = 1.0
    numbers = torch.rand(64, 1, dtype=torch.float64)
    numbers[2:4], numbers[4:6] = 0.0, 1 - 2**-53
    drawn = draw(weights, numbers)
    whole = weights.cumsum(-1, dtype=torch.float64)
    expected = torch.searchsorted(whole, numbers * whole[:, -1:], right=True)
    assert (drawn >= 0).all() and (drawn < vocabulary).all()
    assert (weights[1:].gather(1, drawn[1:]) > 0).all()
    assert torch.equal(drawn[1:], expected[1:])


class Sums(TorchDispatchMode):
    """Records the dtypes that cumulative sums add up."""

    def __init__(self):
        super().__init__()
        self.added = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.cumsum:
            self.added.append((kwargs or {}).get("dtype") or args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("vocabulary", [512, 151_936])
def test_a_gpu_in_deterministic_mode_adds_up_integers(vocabulary):
    """Torch refuses the cumulative sum of floats there. Tensors without memory stand in for those of a GPU."""

    def added(device):
        with Sums() as sums:
            weights = torch.ones(2, vocabulary, device=device)
            rows = torch.zeros(2, device=device, dtype=torch.float64)
            filters = rows.long(), rows
            draw(sampling._keep_sorted(weights, *filters), rows[:, None])
            if vocabulary >= LARGE:
                draw(sampling._keep_candidates(weights, *filters)[0], rows[:, None])
        return set(sums.added)

    torch.use_deterministic_algorithms(True)
    try:
        assert added("meta") == {torch.int64}
        assert added("cpu") == {torch.float64}
    finally:
        torch.use_deterministic_algorithms(False)
    assert added("meta") == {torch.float64}


@pytest.mark.parametrize("vocabulary", [300, LARGE])
def test_integers_draw_the_tokens_that_floats_draw(vocabulary, monkeypatch):
    weights = (3 * torch.randn(500, vocabulary)).softmax(-1)
    numbers = torch.rand(500, 1, dtype=torch.float64)
    expected = draw(weights, numbers)
    monkeypatch.setattr(sampling, "_running_sums", sampling._fixed_point_sums)
    assert draw(weights, numbers).equal(expected)
    assert draw(weights, torch.ones(500, 1, dtype=torch.float64) - 2**-53).max() < vocabulary


FILTERS = [  # top_k and top_p
    (0, 0.95), (0, 0.5), (50, 1.0), (50, 0.9), (1, 1.0), (1, 0.1), (20, 0.999), (CANDIDATES - 1, 1.0),
    (CANDIDATES, 1.0), (CANDIDATES, 0.3), (CANDIDATES + 1, 0.3), (5000, 0.9), (10**9, 0.9), (0, 1e-9), (0, 1.0),
]  # fmt: skip


def filters(rows):
    """Return a top_k and a top_p for each row."""
    repeated = [FILTERS[row % len(FILTERS)] for row in range(rows)]
    top_k, top_p = zip(*repeated, strict=True)
    return torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)


def ties(logits):
    """Return the logits that a model in bfloat16 would give. Many are equal."""
    return logits.bfloat16().float()


def masked(logits):
    """Return logits that leave only 700 tokens possible."""
    return logits.index_fill(-1, torch.arange(700, logits.shape[-1]), -float("inf"))


SHAPES = {
    "flat": lambda x: x,
    "equal": lambda x: 0 * x,
    "peaked": lambda x: 4 * x,
    "certain": lambda x: 300 * x,
    "ties": lambda x: ties(4 * x),
    "flat ties": lambda x: ties(x / 4),
    "few values": lambda x: (2 * x).round(),
    "masked": lambda x: masked(ties(x)),
}


@pytest.mark.parametrize("sums", ["floats", "integers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_keep_what_the_sorted_vocabulary_keeps(shape, sums, monkeypatch):
    if sums == "integers":  # as on a GPU in deterministic mode
        monkeypatch.setattr(sampling, "_running_sums", sampling._fixed_point_sums)
    torch.manual_seed(0)
    for vocabulary in (LARGE, 50_001):
        probs = SHAPES[shape](torch.randn(2 * len(FILTERS), vocabulary)).softmax(-1)
        given = probs.clone()
        rows = filters(len(probs))
        assert keep_likely(probs, *rows).equal(sampling._keep_sorted(probs, *rows))
        assert probs.equal(given)


def test_candidates_keep_the_first_of_equally_likely_tokens():
    probs = torch.full((1, LARGE), 1e-6)
    probs[0, torch.randperm(LARGE)[:1000]] = 1e-4
    expected = (probs[0] == 1e-4).nonzero()[:600, 0]
    kept, certain = sampling._keep_candidates(probs, torch.tensor([600]), torch.ones(1, dtype=torch.float64))
    assert certain.all() and kept[0].nonzero()[:, 0].equal(expected)


def test_uncertain_rows_alone_are_sorted_whole(monkeypatch):
    """Rows 1, 2, 4, 5 and 6 are uncertain, each for another reason."""
    torch.manual_seed(0)
    flat, peaked = torch.randn(LARGE).softmax(-1), (4 * torch.randn(LARGE)).softmax(-1)
    broken = torch.full((LARGE,), float("nan"))
    wide = torch.full((LARGE,), 1e-6)  # the second likeliest token is as likely as all others
    wide[5000] = 0.5
    halves = torch.full((LARGE,), 1e-14)  # rounding decides whether one half is enough
    halves[[7, 8]] = 0.5
    rows = [
        (peaked, 0, 0.9), (flat, 0, 0.9), (wide, 2, 1.0), (peaked, 50, 1.0), (peaked, CANDIDATES + 1, 1.0),
        (halves, 0, 0.5), (broken, 50, 1.0),
    ]  # fmt: skip
    probs, top_k, top_p = zip(*rows, strict=True)
    given = torch.stack(probs), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)
    whole, calls = sampling._keep_sorted, []
    monkeypatch.setattr(sampling, "_keep_sorted", lambda *x: calls.append(x[0]) or whole(*x))
    found, expected = keep_likely(*given), whole(*given)
    assert torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)
    assert len(calls) == 1
    assert torch.allclose(calls[0], given[0][[1, 2, 4, 5, 6]], rtol=0, atol=0, equal_nan=True)
    candidates, _ = sampling._keep_candidates(*given)
    assert (candidates != expected)[[1, 4]].any(-1).all()  # so the comparison fails if no row is sorted


class Reads(TorchDispatchMode):
    """Counts the calls for which the host must wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waits = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)
        by_mask = function.overloadpacket is torch.ops.aten.index and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        self.count += function.overloadpacket in waits or by_mask
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("spread", [1, 4])
def test_filtering_waits_for_a_gpu_once(spread, monkeypatch):
    probs = (spread * torch.randn(4, LARGE)).softmax(-1)
    plain, lists = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x.shape) or plain(x))
    with Reads() as reads:
        keep_likely(probs, torch.zeros(4, dtype=torch.int64), torch.full((4,), 0.9, dtype=torch.float64))
    assert (lists, reads.count) == ([(4,)], 0)


@pytest.mark.parametrize("vocabulary", [320, LARGE])
@pytest.mark.parametrize("static", [False, True])
def test_absent_ids_are_never_sampled_and_leave_logprobs_alone(vocabulary, static):
    absent_A = torch.tensor([0, 7, *range(vocabulary - 100, vocabulary)])
    logits = torch.randn(4, vocabulary)
    logits[:, absent_A] += 6  # nearly all of the probability
    whole_BV = logits.log_softmax(-1)
    params = [SamplingParams(temperature=0.0)] + [SamplingParams(seed=seed) for seed in range(3)]
    if static:
        sampler = StaticSampler(Kind.of(params), 4, torch.device("cpu"), absent_A)
        sampler.set(params, [0] * 4)
    else:
        params[2:] = [SamplingParams(seed=1, top_k=5), SamplingParams(seed=2, top_p=0.5)]
        sampler = Sampler(params, [0] * 4, torch.device("cpu"), absent_A)
    for _ in range(50):
        tokens_B, logprobs_B = sampler(logits.clone())
        assert not torch.isin(tokens_B, absent_A).any()
        torch.testing.assert_close(logprobs_B, whole_BV.gather(1, tokens_B[:, None])[:, 0])
        if static:
            sampler.place_1.add_(1)
    logits[1, 5] = torch.nan
    assert not sampler(logits.clone())[1][1].isfinite()  # an engine detects it


def test_a_target_that_rounding_made_the_whole_sum_is_in_the_sum():
    weights = torch.tensor([[0.25, 0.3, 0.0, 0.0]], dtype=torch.float64)
    assert draw(weights, torch.ones(1, 1, dtype=torch.float64)).item() == 1
