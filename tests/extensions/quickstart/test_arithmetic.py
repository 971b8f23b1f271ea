"""Generated problems: as many as asked for."""

import pytest

from rl4llm.core.errors import DataError
from rl4llm.extensions.quickstart.arithmetic import DEFAULT_LIMIT, LARGEST_LIMIT, arithmetic_rows


def test_as_many_problems_as_the_limit_says():
    assert len(arithmetic_rows("train", 1)) == 1
    assert len(arithmetic_rows("train")) == DEFAULT_LIMIT


def test_the_largest_limit_is_found_among_the_held_out_problems():
    assert len(arithmetic_rows("test", LARGEST_LIMIT)) == LARGEST_LIMIT


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("limit", [0, -1, LARGEST_LIMIT + 1])
def test_another_limit_is_refused(split, limit):
    with pytest.raises(DataError, match=rf"eval\.limit: {limit} generated .* Accepted: 1 to 16384"):
        arithmetic_rows(split, limit)
