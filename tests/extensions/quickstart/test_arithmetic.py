"""Generated problems: as many as asked for."""

import pytest

from rl4llm.core.errors import DataError
from rl4llm.extensions.quickstart.arithmetic import DEFAULT_LIMIT, arithmetic_rows


def test_as_many_problems_as_the_limit_says():
    assert len(arithmetic_rows("train", 1)) == 1
    assert len(arithmetic_rows("train")) == DEFAULT_LIMIT


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit):
    with pytest.raises(DataError, match=f"data.limit={limit} is not accepted"):
        arithmetic_rows("train", limit)
