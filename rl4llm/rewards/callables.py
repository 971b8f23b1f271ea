"""Whatever may stand for a reward, made into one: names, mappings, classes and plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState, Score
from rl4llm.core.errors import ConfigError, RewardError, unknown
from rl4llm.core.option_types import check_types
from rl4llm.core.threads import all_together
from rl4llm.core.types import ChatMessage
from rl4llm.rewards.registry import REWARDS
from rl4llm.rewards.replies import as_sample, final_reply, policy_messages

RewardLike = BaseRewardFunction | type[BaseRewardFunction] | str | Mapping[str, Any] | Callable[..., Any]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def as_reward_function(
    obj: RewardLike, name: str | None = None, provided: Mapping[str, Any] | None = None
) -> BaseRewardFunction:
    """A reward function from any of these; `name` is under which it is logged, its own name when None.

    - an instance of BaseRewardFunction (returned as it is) or a subclass (called without options);
    - a registered name or ``"package.module:Thing"``;
    - a mapping ``{"name": one of those, "label": name or nothing, **options}``;
    - a function ``f(completions, **columns) -> list[float]``, see `BatchCallable`.

    `provided` are objects of the run, such as its sandbox: a class that has a parameter of that name gets them.
    Raises ConfigError for unknown names and options, RewardError for anything else.
    """
    if isinstance(obj, BaseRewardFunction):
        return obj
    if isinstance(obj, str):
        return _build(obj, REWARDS[obj], {}, name, provided)
    if isinstance(obj, Mapping):
        return _from_mapping(obj, name, provided)
    if callable(obj):
        return _build(getattr(obj, "__name__", type(obj).__name__), obj, {}, name)
    raise RewardError(
        f"{obj!r:.200} is not a reward. Accepted: a BaseRewardFunction, a registered name ({', '.join(REWARDS)}), "
        "'package.module:Thing', a mapping with 'name' and options, or a function f(completions, **columns) -> list[float]."
    )


class BatchCallable(BaseRewardFunction):
    """A plain function over a whole batch as a reward: ``f(completions, **columns) -> list[float]``.

        def short(completions, **columns):
            return [1.0 if len(text) < 80 else 0.0 for text in completions]

    `completions` holds the text of each sample's last reply. By name, and only if the function has a parameter of that
    name (or ``**columns``), it gets lists of the same length: `prompts` (the prompt's messages as dicts with role and
    content), `messages` (the whole conversation as ChatMessages), `ground_truth`, and the columns of the dataset. It may be
    async.

    Args:
        function: what scores.
        name: under which the score is logged.
        per_turn: whether it returns, for each sample, a list with a number for each turn of the policy.
        examples: what it must give to known conversations before training starts.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Score] | Coroutine[Any, Any, Sequence[Score]]],
        name: str,
        *,
        per_turn: bool = False,
        examples: Sequence[RewardExample] = (),
    ):
        super().__init__(name)
        self.function = function
        self.per_turn = per_turn
        self._examples = examples
        self.parameters = inspect.signature(function).parameters

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> Score:
        score = self.score_batch([as_sample(messages, ground_truth, kwargs)])[0]
        if isinstance(score, Exception):
            raise score
        return score

    def score_batch(self, samples: Sequence[SampleState]) -> Sequence[Score | Exception]:
        """The function's scores; RewardError when it asks for a column that is not there."""
        available = self.columns(samples)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values()):
            available = {name: column for name, column in available.items() if name in self.parameters}
        completions = self.completions(samples)
        positional = [] if self._takes_by_name("completions") else [completions]
        if not positional:
            available["completions"] = completions
        self._check_columns(available, samples, len(positional))
        scores = self.function(*positional, **available)
        if not isinstance(scores, Coroutine):
            return scores
        result = all_together([scores])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def completions(self, samples: Sequence[SampleState]) -> list[Any]:
        """What it gets as `completions`."""
        return [final_reply(policy_messages(sample)) for sample in samples]

    def columns(self, samples: Sequence[SampleState]) -> dict[str, list[Any]]:
        """What it can get by name beside them."""
        names = dict.fromkeys(name for sample in samples for name in sample.columns)
        columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
        return columns | {
            "prompts": [[message.to_dict() for message in sample.messages[: sample.init_msg_size]] for sample in samples],
            "messages": [list(sample.messages) for sample in samples],
            "ground_truth": [sample.ground_truth for sample in samples],
        }

    def examples(self) -> Sequence[RewardExample]:
        return self._examples

    def _takes_by_name(self, name: str) -> bool:
        parameter = self.parameters.get(name)
        if parameter is not None:
            return parameter.kind in _NAMED
        return all(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())

    def _check_columns(self, available: Mapping[str, Any], samples: Sequence[SampleState], num_positional: int) -> None:
        required = [
            parameter.name
            for parameter in list(self.parameters.values())[num_positional:]
            if parameter.kind in _NAMED and parameter.default is parameter.empty
        ]
        missing = [name for name in required if name not in available]
        if missing:
            raise RewardError(
                f"Reward {self.name!r} asks for {', '.join(map(repr, missing))}, which the dataset does not have. "
                f"It can get: completions, {', '.join(sorted(self.columns(samples)))}."
            )


def _from_mapping(spec: Mapping[str, Any], name: str | None, provided: Mapping[str, Any] | None) -> BaseRewardFunction:
    options = dict(spec)
    key = options.pop("name", None)
    label = options.pop("label", None)
    if not isinstance(key, str):
        known = ", ".join(REWARDS)
        raise ConfigError(f"A reward needs 'name', one of: {known} or 'package.module:Thing'; got {dict(spec)!r}.")
    return _build(key, REWARDS[key], options, name or label, provided)


def _build(
    key: str, item: Any, options: dict[str, Any], name: str | None, provided: Mapping[str, Any] | None = None
) -> BaseRewardFunction:
    if isinstance(item, BaseRewardFunction):
        _check_options(key, {}, options)
        return item
    if inspect.isclass(item) and issubclass(item, BaseRewardFunction):
        named = options | ({"name": name} if name else {})
        parameters = inspect.signature(item).parameters
        _check_options(key, parameters, named)
        check_types(f"rewards: {key}", item, named)
        inner = {option: named[option] for option in item.rewards_among_options if option in named}
        named |= {option: as_reward_function(reward, provided=provided) for option, reward in inner.items()}
        return item(**{key: thing for key, thing in (provided or {}).items() if key in parameters} | named)
    _check_options(key, {}, options)
    if not callable(item):
        raise RewardError(f"rewards.name={key!r} is {item!r:.200}, which is neither a BaseRewardFunction nor a function.")
    return BatchCallable(item, name or getattr(item, "__name__", type(item).__name__).strip("<>"))


def _check_options(key: str, accepted: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for option in options:
        if option not in accepted:
            raise ConfigError(unknown(f"An option of reward {key!r}", option, accepted))
    missing = [
        parameter.name
        for parameter in accepted.values()
        if parameter.kind in _NAMED and parameter.default is parameter.empty and parameter.name not in options
    ]
    if missing:
        raise ConfigError(f"Reward {key!r} needs the option {', '.join(missing)}. It accepts: {', '.join(accepted)}.")
