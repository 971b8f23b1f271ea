"""Make rewards of names, mappings, classes and plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

from rl4llm.core.base_env import BaseRewardFunction, RewardExample, SampleState, Score
from rl4llm.core.base_reward import BaseBatchReward, final_reply, number_text, policy_messages
from rl4llm.core.errors import ConfigError, RewardError, unknown, unnamed
from rl4llm.core.schema import check_values, fits, refusal
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
        return obj
    if isinstance(obj, str):
        return _build(obj, REWARDS[obj], {}, name, provided)
    if isinstance(obj, Mapping):
        options = dict(obj)
        key, label, success_at = _key_of(options)
        reward = _build(key, REWARDS[key], options, name or label, provided)
        reward.success_at = reward.success_at if success_at is None else success_at
        return reward
    if callable(obj):
        return _build(getattr(obj, "__name__", type(obj).__name__), obj, {}, name)
    raise RewardError(
        f"{obj!r:.200} is not a reward. Accepted: an object, a name, a mapping or a function of rewards."
    )


def check_reward(spec: str | Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown reward of a configuration, or unknown options; the reward is not made."""
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    key, label, _ = _key_of(options)
    item = REWARDS[key]
    _check_options(key, item, options | ({"name": label} if label and _is_class(item) else {}))
    for option in item.rewards_among_options if _is_class(item) else ():
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
        available = self.columns(samples)
        kinds = {name: parameter.kind for name, parameter in self.parameters.items()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        if not takes_any:
            available = {name: column for name, column in available.items() if name in kinds}
        completions = self.completions(samples)
        only_by_name = set(kinds.values()) <= {inspect.Parameter.VAR_KEYWORD} or (self.by_name and takes_any)
        by_name = kinds["completions"] in _NAMED if "completions" in kinds else only_by_name
        positional = [] if by_name else [completions]
        if by_name:
            available["completions"] = completions
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


def _key_of(options: dict[str, Any]) -> tuple[str, str | None, float | None]:
    """Pop the registered name, the name for the log and the score of a success from the options."""
    spec = dict(options)
    key, label, success_at = (options.pop(name, None) for name in ("name", "label", "success_at"))
    if not isinstance(key, str):
        raise ConfigError(unnamed("A reward", spec, REWARDS))
    if not fits(success_at, float | None):
        raise ConfigError(refusal(f"rewards.{key}.success_at", success_at, float | None))
    return key, label, success_at


def _build(
    key: str, item: Any, options: dict[str, Any], name: str | None, provided: Mapping[str, Any] | None = None
) -> BaseRewardFunction:
    if not _is_class(item):
        _check_options(key, item, options)
        if isinstance(item, BaseRewardFunction):
            return item
        return BatchCallable(item, name or getattr(item, "__name__", type(item).__name__).strip("<>"))
    named = options | ({"name": name} if name else {})
    _check_options(key, item, named)
    inner = {option: named[option] for option in item.rewards_among_options if option in named}
    named |= {option: as_reward_function(reward, provided=provided) for option, reward in inner.items()}
    accepted, provided = inspect.signature(item).parameters, provided or {}
    parts = {part: provided[part] for part in provided if part in accepted}  # each is made when it is read
    reward: BaseRewardFunction = item(**parts | named)
    if not hasattr(reward, "name"):
        raise ConfigError(f"The reward {item.__name__}: __init__ must call super().__init__(name).")
    return reward


def _is_class(item: Any) -> TypeGuard[type[BaseRewardFunction]]:
    return inspect.isclass(item) and issubclass(item, BaseRewardFunction)


def _check_options(key: str, item: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that a class of rewards does not take, and for any of other rewards."""
    if missing := sorted(getattr(item, "__abstractmethods__", ())):
        raise ConfigError(f"Reward {key!r}: the class {item.__name__} does not define {', '.join(missing)}.")
    accepted = inspect.signature(item).parameters if _is_class(item) else {}
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in accepted.values()):
        known = {*accepted, "name", "label", "success_at", "weight"}
        for option in options.keys() - accepted.keys():
            raise ConfigError(unknown(f"An option of reward {key!r}", option, known - {option}))
        named = (each for each in accepted.values() if each.kind is not each.VAR_POSITIONAL)
        required = (each.name for each in named if each.default is each.empty)
        if missing := [name for name in required if name not in options]:
            names = f"{', '.join(missing)}. It accepts: {', '.join(accepted)}"
            raise ConfigError(f"Reward {key!r} needs the option {names}.")
    check_values(f"rewards.{key}", item, options)
