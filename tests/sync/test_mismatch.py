"""How far engine and trainer are apart: each number against its definition, and a limit that stops."""

import math

import pytest
import torch

from rl4llm.core.errors import MismatchError
from rl4llm.core.types import TrainBatch
from rl4llm.sync.verify import BOUNDS, check_mismatch, mismatch_warning, summarize_mismatch, token_mismatch


def batch(sampled_BT):
    ones_BT = torch.ones_like(sampled_BT)
    ids_BT = ones_BT.long()
    return TrainBatch(ids_BT, ids_BT, ids_BT, ids_BT.bool(), sampled_BT, ones_BT, ones_BT)


def means(sampled, trained):
    """Reduce the metrics of each token as a backend does: means, and a maximum."""
    metrics = token_mismatch(batch(torch.tensor([sampled])), torch.tensor([trained]))
    return {
        name: (values.max() if name.endswith("/max") else values.mean()).item()
        for name, values in metrics.items()
    }


def test_equal_log_probs_are_no_mismatch():
    found = summarize_mismatch(means([-1.0, -2.0], [-1.0, -2.0]))
    assert found == {
        "mismatch/mean": 0,
        "mismatch/max": 0,
        "mismatch/k3": 0,
        "mismatch/ess": pytest.approx(1),
    }


def test_each_number_is_what_its_definition_says():
    found = summarize_mismatch({"loss": 3.0, **means([-1.0, -2.0], [-1.1, -1.7])})
    ratios = [math.exp(-0.1), math.exp(0.3)]  # of the trainer's probability to the engine's
    assert found["loss"] == 3.0
    assert found["mismatch/mean"] == pytest.approx(0.2)
    assert found["mismatch/max"] == pytest.approx(0.3)
    assert found["mismatch/k3"] == pytest.approx(
        sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 2, rel=1e-5
    )
    assert found["mismatch/ess"] == pytest.approx(
        sum(ratios) ** 2 / (2 * sum(ratio**2 for ratio in ratios)), rel=1e-5
    )
    assert not any("weight" in name for name in found)


def test_k3_estimates_the_divergence_of_trainer_and_engine():
    torch.manual_seed(0)
    engine_V, trainer_V = torch.randn(2, 8).log_softmax(-1)
    tokens = torch.multinomial(engine_V.exp(), 200_000, replacement=True)
    found = means(engine_V[tokens].tolist(), trainer_V[tokens].tolist())
    exact = (engine_V.exp() * (engine_V - trainer_V)).sum().item()
    other = (trainer_V.exp() * (trainer_V - engine_V)).sum().item()
    assert found["mismatch/k3"] == pytest.approx(exact, rel=0.03)
    assert abs(exact - other) > 0.1 * exact


@pytest.mark.parametrize("dtype", sorted(BOUNDS))
def test_a_mismatch_beyond_rounding_is_a_warning(dtype):
    bound = BOUNDS[dtype]
    assert mismatch_warning({"mismatch/mean": 0.9 * bound, "mismatch/max": 9 * bound}, bound) == ""
    assert mismatch_warning({}, bound) == ""
    for mean, largest in ((1.1 * bound, bound), (0.1 * bound, max(2.8, 10.1 * bound))):
        assert mismatch_warning({"mismatch/mean": mean, "mismatch/max": largest}, bound)


@pytest.mark.parametrize("mean", [0.0101, math.inf, math.nan])
def test_a_mismatch_beyond_the_limit_stops_training(mean):
    with pytest.raises(MismatchError):
        check_mismatch({"mismatch/mean": mean, "mismatch/max": 0.5}, 0.01)


def test_a_step_of_old_tokens_stops_by_the_canary():
    with pytest.raises(MismatchError):
        check_mismatch({"mismatch/newest": 0.0}, 0.01, 0.02)
    check_mismatch({"mismatch/mean": 0.001, "mismatch/max": 0.5}, 0.01, 0.02)


def test_a_mismatch_within_the_limit_does_not_stop_training():
    check_mismatch({"mismatch/mean": 0.01, "mismatch/max": 0.5}, 0.01)
    check_mismatch({"mismatch/mean": 9.0, "mismatch/max": 9.0}, None)
    check_mismatch({"update/empty": 1.0}, 0.01)
