"""Tests with many cases of one kind: a sample always runs, all of them with `pytest --sweep`, as every night.

@pytest.mark.parametrize("level", sampled(LEVELS, ["bwrap"]))
def test_a_program_is_contained(level): ...

A sample holds each distinct behaviour at least once. A test that loops over cases by itself asks the fixture `sweep`.
"""

import pytest


def sampled(cases, sample):
    """Mark the cases for `parametrize` that are not in the sample, a function of a case or the sample's cases."""
    kept = sample if callable(sample) else list(sample).__contains__
    return [case if kept(case) else _only_in_a_sweep(case) for case in cases]


def every(number):
    """Return a sample of every `number`-th case, from the first one on."""
    counted = iter(range(10**9))
    return lambda case: next(counted) % number == 0


def _only_in_a_sweep(case):
    marked = _as_param(case)
    return pytest.param(*marked.values, marks=[*marked.marks, pytest.mark.sweep], id=marked.id)


def _as_param(case):
    if hasattr(case, "values") and hasattr(case, "marks"):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
