"""The errors rl4llm raises on purpose; each message names where, what was given, and what is accepted or the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl4llm.core.redact import redacted_text


class RL4LLMError(Exception):
    """Base of all errors that a user can act on; the command line prints them without a traceback.

    Messages quote configurations and addresses, and are shown, logged and stored: secrets in them are hidden.
    """

    def __str__(self) -> str:
        return redacted_text(super().__str__())


class ConfigError(RL4LLMError):
    """A configuration key, value or combination is not accepted."""


class DataError(RL4LLMError):
    """A dataset file, row or column cannot be used."""


class SpecialTokenError(DataError):
    """A text contains a special token, and data.special_tokens=refuse."""


class TemplateError(RL4LLMError):
    """A chat template cannot be extended token for token."""


class ModelError(RL4LLMError):
    """A model or tokenizer cannot be used."""


class EnvError(RL4LLMError):
    """An environment broke its contract, or too many of its episodes failed."""


class TooManyFailuresError(EnvError):
    """Too large a share of a rollout's episodes failed; `failed` are their samples, for the episode record."""

    def __init__(self, message: str, failed: Sequence[Any] = ()):
        super().__init__(message)
        self.failed = tuple(failed)


class HostsDownError(EnvError):
    """No environment server was reachable for too long. The run stops; the same command resumes it."""


class RewardError(RL4LLMError):
    """A reward function broke its contract."""


class AlgorithmError(RL4LLMError):
    """An algorithm broke its contract."""


class SandboxError(RL4LLMError):
    """No sandbox can be started that is as strong as the configuration requires."""


class EngineError(RL4LLMError):
    """An inference engine failed or was asked something impossible."""


class StaleWeightsError(EngineError):
    """An engine does not hold the trainer's weights."""


class MismatchError(EngineError):
    """An engine's log-probs are further from the trainer's than the user accepts."""


class UnreachableError(EngineError):
    """A server gave no usable answer; the same request may succeed later or on another server."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedError(EngineError):
    """A server understood a request and refused it; a retry would not help. `status` is that of HTTP, if there is one."""

    def __init__(self, message: str, *, status: int = 0):
        super().__init__(message)
        self.status = status


class UnreadableError(EngineError):
    """A server would read the tokens of a prompt as something else, or never answer. An episode with such tokens ends."""


class EnginesDownError(EngineError):
    """No server was reachable for too long. The run stops; the same command resumes it."""


class WeightsError(RL4LLMError):
    """A version of the weights is damaged, incomplete or not finite; no engine receives it."""


class CheckpointError(RL4LLMError):
    """A checkpoint is damaged or belongs to another run."""


class DivergedError(RL4LLMError):
    """Training diverged: the policy's log-probs are not finite, or a step moved them too far for engines to follow."""


class NotFiniteError(DivergedError):
    """Losses or gradients were not finite several times in a row. Training stops and keeps the last step for replay."""


class RanksError(RL4LLMError):
    """A rank lost the other ranks: they died, or did not connect within the deadline."""


class RunDirError(RL4LLMError):
    """The output directory cannot be used."""


def unknown(where: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: what was given, what is accepted, and the closest match.

    >>> unknown("algorithm.name", "gpro", ["dapo", "grpo"])
    "algorithm.name='gpro' is unknown. Known: dapo, grpo. Did you mean 'grpo'?"
    """
    names = sorted(known)
    return f"{where}={name!r} is unknown. Known: {', '.join(names) or 'none'}.{did_you_mean(name, names)}"


def unnamed(where: str, given: Mapping[str, Any], known: Iterable[str]) -> str:
    """Return the message for a mapping whose key `name` is missing, misspelled or wrong."""
    near = "".join(did_you_mean(key, ["name"]) for key in map(str, given) if key != "name")
    names = f"{', '.join(known)} or 'package.module:Thing'"
    return f"{where} needs 'name', one of: {names}; got {dict(given)!r:.200}.{near}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the closest match of a name as a sentence that follows another one; "" if no name is close."""
    by_lower = {item.lower(): item for item in known}
    close = [by_lower[item] for item in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.65)]
    # Another case and letters in another order are the likeliest slips.
    close.sort(key=lambda item: sorted(item.lower()) != sorted(name.lower()))
    return f" Did you mean {close[0]!r}?" if close else ""
