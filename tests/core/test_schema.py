"""Options of the wrong type are refused in words, before anything runs; what no YAML file can hold is not judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from rl4llm.algorithms import ALGORITHMS
from rl4llm.compose import build_algorithm
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import (
    Count,
    Range,
    Share,
    check_fields,
    check_options,
    check_values,
    checked,
    choices_of,
    with_options,
)
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
        weights: dict[str, float] | None = None,
        mode: Literal["a", "b"] = "a",
        size: Literal["auto", 0] = "auto",
        pair: tuple[str, int] = ("a", 1),
        on: bool = False,
        judge: Base | None = None,
        plain=None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)


@dataclass
class Nested:
    most: Count | None = None
    part: Share = 1.0
    below: Annotated[float, Range(0, 0.5, without=0.5)] = 0.0
    shares: list[Share] = field(default_factory=list)
    unit: Literal["tokens", "chars"] | None = None


@dataclass
class Whole:
    inner: Nested = field(default_factory=Nested)


class Own:
    @checked("rewards.{name}")
    def __init__(self, name: str = "own", *, most: Count = 1, unit: Literal["tokens", "chars"] = "tokens"):
        self.most = most


def unseen(share: float, other: Unseen | None = None):
    """Its annotations cannot be read here."""


def prose(share: "how much of it"):  # noqa: F722
    """Its annotation is none."""


GOOD = {
    "rank": [3, -1], "share": [0.5, 1, -2.0], "names": [None, [], ["a"], ("a", "b")], "by_name": [None, {}, {"a": 1}],
    "mode": ["a", "b"], "size": ["auto", 0], "pair": [["b", 2]], "on": [True],
    "weights": [None, {}, {"a": 1, "b": -0.5}], "judge": [None, Base(), "a name"], "plain": ["x", 1, []],
}  # fmt: skip
BAD = {
    "rank": ["3", 1.5, True, None], "share": ["0.5", True, None, [1.0], float("nan"), float("inf")],
    "names": ["a", 1, [1], {"a": 1}], "by_name": ["a", [1]], "weights": [{"a": "1"}, {"a": None}, [1.0]],
    "mode": [1, None, "c"], "size": ["aut", 1], "on": ["yes", 1],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_an_option_is_checked_by_its_annotation(name):
    for value in GOOD[name]:
        check_values("env", Made, {name: value})
    for value in BAD.get(name, ()):
        with pytest.raises(ConfigError):
            check_values("env", Made, {name: value})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"most": 0}, "inner.most=0 is not accepted: a whole number, 1 or above, or null."),
        ({"part": 0}, "inner.part=0 is not accepted: a finite number, above 0, at most 1."),
        ({"part": 1.5}, "inner.part=1.5 is not accepted: a finite number, above 0, at most 1."),
        ({"below": 0.5}, "inner.below=0.5 is not accepted: a finite number, at least 0, below 0.5."),
        (
            {"shares": [1, 0]},
            "inner.shares=[1, 0] is not accepted: a list, each item a finite number, above 0, at most 1.",
        ),
        (
            {"unit": "token"},
            "inner.unit='token' is not accepted: tokens or chars or null. Did you mean 'tokens'?",
        ),
        (
            {"unit": "Chars"},
            "inner.unit='Chars' is not accepted: tokens or chars or null. Did you mean 'chars'?",
        ),
    ],
)
def test_ranges_and_choices_stand_beside_the_field(wrong, says):
    check_fields(Whole(Nested(most=1, part=1, below=0, shares=[0.1, 1], unit="chars")))
    with pytest.raises(ConfigError) as caught:
        check_fields(Whole(Nested(**wrong)))
    assert str(caught.value) == says
    assert choices_of(Literal["a", 0] | None) == ["a"]


def test_a_constructor_checks_what_python_gives_it():
    assert Own("mine", most=2).most == 2
    for wrong in ({"most": 0}, {"unit": "char"}):
        with pytest.raises(ConfigError):
            Own("mine", **wrong)
    with pytest.raises(TypeError):
        Own(least=0)
    check_options("rewards.own", Own, {"name": "own", "most": 2})
    with pytest.raises(ConfigError):
        check_options("rewards.own", Own, {"mots": 2})


def test_annotations_that_cannot_be_read_judge_nothing():
    for function in (unseen, prose):
        check_values("env", function, {"share": "abc"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_takes_a_text_for_a_number(name):
    for option in ("entropy_coef", "beta", "nll_coef", "reference_every"):
        if option in ALGORITHMS[name].__dataclass_fields__:
            keys = {"model.path": "m", "algorithm": {"name": name, option: "abc"}}
            with pytest.raises(ConfigError):
                build_algorithm(load_config(overrides=keys))


def test_no_reward_does_either():
    with pytest.raises(ConfigError):
        as_reward_function({"name": "length", "max_length": "abc"})


def test_a_missing_option_is_named_beside_its_place():
    def server(where: str, size: int, /, *words: str, url: str, model: str, most: int = 1, **others: str):
        return where, size, words, url, model, most, others

    for options, names in (({}, "url, model"), ({"url": "u", "most": 2}, "model"), ({"model": "m"}, "url")):
        with pytest.raises(ConfigError, match=rf"^rewards\.judge needs {names}\."):
            with_options("rewards.judge", server, options, "here", 1)
    made = with_options("rewards.judge", server, {"model": "m"}, "here", 1, url="u")
    assert made == ("here", 1, (), "u", "m", 1, {})
