"""Options of the wrong type are refused in words, before anything runs; what no YAML file can hold is not judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest

from rl4llm.algorithms import ALGORITHMS
from rl4llm.build import build_algorithm
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.core.option_types import check_types
from rl4llm.rewards import as_reward_function

if TYPE_CHECKING:
    from nowhere import Unseen


class Base:
    def __init__(self, rank: int = 0, **kwargs: Any):
        pass


class Made(Base):
    def __init__(
        self,
        *args: Any,
        share: float = 0.5,
        names: Sequence[str] | None = None,
        by_name: Mapping[str, Any] | None = None,
        mode: Literal["a", "b"] = "a",
        size: Literal["auto", 0] = "auto",
        pair: tuple[str, int] = ("a", 1),
        on: bool = False,
        judge: Base | None = None,
        plain=None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)


@dataclass(slots=True)
class Record:
    share: float = 0.5


def unseen(share: float, other: Unseen | None = None):
    """Its annotations cannot be read here."""


def prose(share: "how much of it"):  # noqa: F722
    """Its annotation is none."""


GOOD = {
    "rank": [3, -1], "share": [0.5, 1, -2.0], "names": [None, [], ["a"], ("a", "b")], "by_name": [None, {}, {"a": 1}],
    "mode": ["a", "c"], "size": ["auto", 0], "pair": [["b", 2]], "on": [True],
    "judge": [None, Base(), "a name"], "plain": ["x", 1, []],
}  # fmt: skip
BAD = {
    "rank": ["3", 1.5, True, None], "share": ["0.5", True, None, [1.0], float("nan"), float("inf")],
    "names": ["a", 1, [1], {"a": 1}], "by_name": ["a", [1]], "mode": [1, None], "on": ["yes", 1],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_an_option_is_held_against_its_annotation(name):
    for value in GOOD[name]:
        check_types("env", Made, {name: value})
    for value in BAD.get(name, ()):
        with pytest.raises(ConfigError, match=rf"^env\.{name}=.* is not accepted: "):
            check_types("env", Made, {name: value})


def test_the_message_says_what_is_accepted():
    with pytest.raises(ConfigError, match=r"^env\.names='a' is not accepted: a list, each item of it a text or null\.$"):
        check_types("env", Made, {"names": "a"})
    with pytest.raises(ConfigError, match=r"^algorithm\.share='x' is not accepted: a finite number\.$"):
        check_types("algorithm", Record, {"share": "x"})


def test_annotations_that_cannot_be_read_judge_nothing():
    for function in (unseen, prose):
        check_types("env", function, {"share": "abc"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_takes_a_text_for_a_number(name):
    for option in ("entropy_coef", "beta", "nll_coef", "reference_every"):
        if option in ALGORITHMS[name].__dataclass_fields__:
            keys = {"model.path": "m", "algorithm": {"name": name, option: "abc"}}
            with pytest.raises(ConfigError, match=rf"algorithm\.{option}='abc' is not accepted: a"):
                build_algorithm(load_config(overrides=keys))


def test_no_reward_does_either():
    with pytest.raises(ConfigError, match=r"rewards: length\.max_length='abc' is not accepted: a whole number"):
        as_reward_function({"name": "length", "max_length": "abc"})
