"""Make rewards of names, mappings, classes and plain functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState, Score
from rl4llm.core.base_reward import BaseBatchReward, final_reply, number_text, policy_messages
from rl4llm.core.errors import ConfigError, RewardError, unknown, unnamed
from rl4llm.core.schema import check_values
from rl4llm.core.tables import REWARDS
from rl4llm.runtime.runner import all_together

RewardLike = BaseRewardFunction | type[BaseRewardFunction] | str | Mapping[str, Any] | Callable[..., Any]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def as_reward_function(
    obj: RewardLike, name: str | None = None, provided: Mapping[str, Any] | None = None
) -> BaseRewardFunction:
    """Return a reward function made from any of these; it is logged under `name`, by default its own name.

    - an instance of BaseRewardFunction (returned as it is) or a subclass (called without options);
    - a registered name or ``"package.module:Thing"``;
    - a mapping ``{"name": one of those, "label": name or nothing, "success_at": number or nothing, **options}``, whose
      `success_at` replaces that of the reward;
    - a function ``f(completions, **columns) -> list[float]``, see `BatchCallable`.

    `provided` has objects of the run, such as its sandbox, for classes that have a parameter of that name.
    Raises ConfigError for unknown names and options, RewardError for anything else.
    """
    if isinstance(obj, BaseRewardFunction):
        return _made(obj)
    if isinstance(obj, str):
        return _build(obj, REWARDS[obj], {}, name, provided)
    if isinstance(obj, Mapping):
        options = dict(obj)
        key, label, success_at = _key_of(options)
        made = _build(key, REWARDS[key], options, name or label, provided)
        made.success_at = made.success_at if success_at is None else success_at
        return made
    if callable(obj):
        return _build(getattr(obj, "__name__", type(obj).__name__), obj, {}, name)
    raise RewardError(
        f"{obj!r:.200} is not a reward. Accepted: a BaseRewardFunction, a registered name ({', '.join(REWARDS)}), "
        "'package.module:Thing', a mapping with 'name' and options, or a function f(completions, **columns) -> list[float]."
    )


def check_reward(spec: str | Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown reward of a configuration, or unknown options; the reward is not made."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    key, label, _ = _key_of(options)
    item = REWARDS[key]
    _refuse_other_class(key, item)
    if not (inspect.isclass(item) and issubclass(item, BaseRewardFunction)):
        _check_options(key, {}, options)
        return
    _check_class_options(key, item, options | ({"name": label} if label else {}))
    for option in item.rewards_among_options:
        if isinstance(options.get(option), str | Mapping):
            check_reward(options[option])


class BatchCallable(BaseBatchReward):
    """A plain function over a whole batch as a reward: ``f(completions, **columns) -> list[float]``.

        def short(completions, **columns):
            return [1.0 if len(text) < 80 else 0.0 for text in completions]

    `completions` holds the text of each sample's last reply. By name, and only if the function has a parameter of that
    name (or ``**columns``), it gets lists of the same length: `prompts` (the prompt's messages as dicts with role and
    content), `messages` (the whole conversation as ChatMessages), `ground_truth` (a number as text), and the columns
    of the dataset. It may be async. Its attribute `success_at`, if any, is that of the reward.

    Args:
        function: what scores.
        name: under which the score is logged.
        per_turn: whether it returns, for each sample, a list with a number for each turn of the policy.
        examples: what it must give to known conversations before training starts.
    """

    # even to a function without a parameter `completions`, if it takes any name; and numbers stay numbers
    by_name: ClassVar[bool] = False

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
        self.success_at = getattr(function, "success_at", None)
        self._examples = examples
        self.parameters = inspect.signature(function).parameters
        truth = self.parameters.get("ground_truth")
        self.needs_ground_truth = truth is not None and truth.default is truth.empty

    def score_batch(self, samples: Sequence[SampleState]) -> Sequence[Score | Exception]:
        """Return the function's scores; raises RewardError if it needs a column that the dataset lacks."""
        available = self.columns(samples)
        kinds = {name: parameter.kind for name, parameter in self.parameters.items()}
        if inspect.Parameter.VAR_KEYWORD not in kinds.values():
            available = {name: column for name, column in available.items() if name in kinds}
        completions = self.completions(samples)
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        only_by_name = set(kinds.values()) <= {inspect.Parameter.VAR_KEYWORD} or (self.by_name and takes_any)
        by_name = kinds["completions"] in _NAMED if "completions" in kinds else only_by_name
        positional = [] if by_name else [completions]
        if by_name:
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
        """Return what the function gets as `completions`."""
        return [final_reply(policy_messages(sample)) for sample in samples]

    def columns(self, samples: Sequence[SampleState]) -> dict[str, list[Any]]:
        """Return what the function can get by name besides `completions`."""
        names = dict.fromkeys(name for sample in samples for name in sample.columns)
        columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
        truths = [sample.ground_truth for sample in samples]
        truths = truths if self.by_name else list(map(number_text, truths))
        if "ground_truth" in self.parameters or any(truth is not None for truth in truths):
            columns["ground_truth"] = truths
        return columns | {
            "prompts": [
                [message.to_dict() for message in sample.messages[: sample.init_msg_size]]
                for sample in samples
            ],
            "messages": [list(sample.messages) for sample in samples],
        }

    def examples(self) -> Sequence[RewardExample]:
        return self._examples

    def _check_columns(
        self, available: Mapping[str, Any], samples: Sequence[SampleState], num_positional: int
    ) -> None:
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


def _key_of(options: dict[str, Any]) -> tuple[str, str | None, float | None]:
    """Pop the registered name, the name for the log and the score of a success from the options."""
    spec = dict(options)
    key, label, success_at = (options.pop(name, None) for name in ("name", "label", "success_at"))
    if not isinstance(key, str):
        raise ConfigError(unnamed("A reward", spec, REWARDS))
    number = isinstance(success_at, int | float) and not isinstance(success_at, bool)
    if success_at is not None and not (number and math.isfinite(success_at)):
        raise ConfigError(
            f"rewards: success_at={success_at!r} of {key!r} is not accepted. Accepted: a finite number, the lowest score of "
            "a success."
        )
    return key, label, success_at


def _build(
    key: str, item: Any, options: dict[str, Any], name: str | None, provided: Mapping[str, Any] | None = None
) -> BaseRewardFunction:
    if isinstance(item, BaseRewardFunction):
        _check_options(key, {}, options)
        return _made(item)
    if inspect.isclass(item) and issubclass(item, BaseRewardFunction):
        named = options | ({"name": name} if name else {})
        parameters = _check_class_options(key, item, named)
        inner = {option: named[option] for option in item.rewards_among_options if option in named}
        named |= {option: as_reward_function(reward, provided=provided) for option, reward in inner.items()}
        provided = provided or {}
        return _made(item(**{key: provided[key] for key in provided if key in parameters} | named))
    _refuse_other_class(key, item)
    _check_options(key, {}, options)
    if not callable(item):
        raise RewardError(
            f"rewards.name={key!r} is {item!r:.200}, which is neither a BaseRewardFunction nor a function."
        )
    return BatchCallable(item, name or getattr(item, "__name__", type(item).__name__).strip("<>"))


def _refuse_other_class(key: str, item: Any) -> None:
    """Raise ConfigError for a class of another base: calling it would make an object and not a score."""
    if inspect.isclass(item) and not issubclass(item, BaseRewardFunction):
        raise ConfigError(
            f"The reward {key!r} is the class {item.__name__}. Accepted: a subclass of BaseRewardFunction, or a function "
            "f(completions, **columns) -> list[float]."
        )


def _check_class_options(
    key: str, item: type[BaseRewardFunction], named: Mapping[str, Any]
) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(item).parameters
    _check_options(key, parameters, named)
    check_values(f"rewards.{key}", item, named)
    _check_call(item)
    return parameters


def _made(reward: BaseRewardFunction) -> BaseRewardFunction:
    """Return a reward; raise ConfigError if its class breaks the contract."""
    kind = type(reward)
    _check_call(kind)
    if not hasattr(reward, "name"):
        raise ConfigError(f"The reward {kind.__name__}: __init__ must call super().__init__(name).")
    return reward


def _check_call(kind: type[BaseRewardFunction]) -> None:
    called = inspect.signature(kind.__call__, follow_wrapped=False).parameters.values()
    if kind.score_batch is BaseRewardFunction.score_batch and all(
        parameter.kind is not parameter.VAR_KEYWORD for parameter in called
    ):
        raise ConfigError(
            f"The reward {kind.__name__}: __call__ must accept all columns of a row. Next: write __call__(self, messages, "
            "ground_truth, **columns)."
        )


def _check_options(key: str, accepted: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for option in options:
        if option not in accepted:
            known = {*accepted, "name", "label", "success_at", "weight"} - {option}
            raise ConfigError(unknown(f"An option of reward {key!r}", option, known))
    missing = [
        parameter.name
        for parameter in accepted.values()
        if parameter.kind in _NAMED and parameter.default is parameter.empty and parameter.name not in options
    ]
    if missing:
        step = " Next: give `name` a default in the class's __init__." if missing == ["name"] else ""
        raise ConfigError(
            f"Reward {key!r} needs the option {', '.join(missing)}. It accepts: {', '.join(accepted)}.{step}"
        )
