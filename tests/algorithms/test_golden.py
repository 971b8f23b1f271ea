"""Every formula equals the numbers of other frameworks, values and gradients, in float64 and in every layout."""

import pytest
import torch
from golden_numbers import CHECKS, EXTRA, LAYOUTS, NOT_OFFERED, QUANTITIES, error, errors, loss
from oracles import ORACLES

from rl4llm.algorithms import ALGORITHMS

TOLERANCE = 1e-9
WRONG = [name for name in QUANTITIES if "_wrong_" in name]


def test_every_stored_quantity_is_checked_or_has_a_reason():
    assert sorted([*CHECKS, *NOT_OFFERED, *WRONG]) == sorted(QUANTITIES)


@pytest.mark.parametrize("name", CHECKS)
def test_methods_give_the_stored_numbers_in_any_arrangement(name):
    for method in CHECKS[name].methods:
        for layout in LAYOUTS:
            assert error(name, method, layout) < TOLERANCE, (method, layout)


def difference(stored, base):
    """Return the largest difference between a stored quantity and what the library gives for its base on the same case."""
    check = CHECKS[base]
    method = next(iter(check.methods))
    found = check.compute(stored, method, check.methods[method], LAYOUTS[0], **dict(check.extra))
    return max(errors(stored, found).values())


def base_of(name):
    """Return the entry that the library gives instead: the one that this is a variant of, in any case."""
    base = QUANTITIES[name]["variant_of"] or name
    for ending in (".equal_group", ".singleton_zero", ".singleton_group", "_ddof0", "_keep_mean"):
        base = base.removesuffix(ending)
    return base


@pytest.mark.parametrize("name", WRONG)
def test_known_mistakes_are_not_repeated(name):
    assert difference(name, base_of(name)) > 1e-3


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_is_not_offered_is_not_given_by_accident(name):
    assert difference(name, base_of(name)) > 1e-7


@pytest.mark.parametrize("name", [name for name in QUANTITIES if "singleton_raw" in name])
def test_a_group_of_one_has_zero_advantage(name):
    assert difference(name, base_of(name)) > 0.1


def test_a_mask_of_the_correction_does_not_shrink_the_divisor():
    kept = QUANTITIES["corr.token_mask_only_kept_denominator"]["result"]["scalar"]
    ours = QUANTITIES["corr.token_mask_only"]["result"]["scalar"]
    assert abs(kept - ours) > 1e-3


def test_k1_as_a_loss_has_the_gradient_of_k2():
    def penalty(estimator):
        options = {"aggregation": "token", "kl_coef": 1.0, "kl_estimator": estimator}
        return loss(f"kl.{estimator}", "grpo", options, LAYOUTS[0], key=None)

    k1, k2 = penalty("k1"), penalty("k2")
    torch.testing.assert_close(k1["grad_new_logprobs"], k2["grad_new_logprobs"], atol=TOLERANCE, rtol=0)
    assert k1["scalar"].item() == pytest.approx(QUANTITIES["kl.k1"]["result"]["scalar"], abs=TOLERANCE)
    assert errors("kl.k1", k1)["grad_new_logprobs"] > 1e-3
    assert max(errors("kl.k2", k2).values()) < TOLERANCE


def test_the_stored_numbers_are_large_enough_to_compare():
    for name, entry in QUANTITIES.items():
        for part in entry["result"]:
            largest = max(map(abs, _numbers(entry["result"][part])))
            assert largest > 1e-4 or ("equal_group" in name or "singleton_zero" in name), (name, part)
    assert len(EXTRA["logits"]) == 5


def test_every_method_has_stored_numbers_or_an_oracle():
    checked = {method for check in CHECKS.values() for method in check.methods}
    assert not set(ALGORITHMS) - checked - set(ORACLES)


def _numbers(stored):
    if isinstance(stored, list):
        return [number for item in stored for number in _numbers(item)]
    return [stored]
