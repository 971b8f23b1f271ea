"""Formulas for which no other framework's numbers were stored equal loops written from the papers."""

import pytest
from oracles import ORACLES

CASES = [(name, oracle) for name, oracles in ORACLES.items() for oracle in oracles]


@pytest.mark.parametrize(("name", "oracle"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_the_library_says_what_the_paper_says(name, oracle):
    assert oracle() < 1e-9
