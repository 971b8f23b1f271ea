"""What a user gives: objects of the Python API, and options that stand beside a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.option_types import check_types


@dataclass(frozen=True, slots=True)
class Given:
    """What the Python API hands over as objects instead of names; None is taken from the configuration."""

    model: Any = None
    tokenizer: Any = None
    dataset: Any = None
    eval_dataset: Any = None
    reward_functions: Sequence[Any] | None = None
    reward_transform_fn: Any = None
    env_class: type[BaseMDPEnv] | None = None
    hosted: Any = None  # what stands for the class of an environment that hosts run, see `build.environments`


def with_options(where: str, make: Callable[..., Any], options: Mapping[str, Any], *args: Any, **fixed: Any) -> Any:
    """Call `make` with a user's options, after checking that it takes them; raises ConfigError."""
    accepted = accepted_options(make) - set(fixed)
    for name in options:
        if name not in accepted:
            raise ConfigError(unknown(f"{where} option", name, accepted))
    check_types(where, make, options)
    try:
        return make(*args, **fixed, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}. Options: {', '.join(sorted(accepted))}.") from error


def accepted_options(make: Callable[..., Any]) -> set[str]:
    """Names of the keyword parameters of a function or of a class and the bases it passes **kwargs to."""
    makers = [vars(cls)["__init__"] for cls in make.__mro__ if "__init__" in vars(cls)] if inspect.isclass(make) else [make]
    names: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names |= {parameter.name for parameter in parameters if parameter.kind in kinds}
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names - {"self"}
