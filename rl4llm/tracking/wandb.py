"""Metrics for Weights & Biases; without a network or a key they are kept in files that `wandb sync` uploads later."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.errors import ConfigError

FINISH_SECONDS = 60.0
SECRET_NAME = re.compile(
    r"(^|[_.\-])((api|access|private|secret)_?key|secret|password|passwd|credentials?|(access|auth|bearer|hf|hub)_?token)$"
    r"|^(key|token)$",
    re.IGNORECASE,
)
HIDDEN = "(hidden)"


class WandbTracker:
    """Logs to the W&B run `run_id`, the same one after a resume. W&B keeps the first value of a step that comes twice.

    `config` is shown in W&B, without anything whose name says that it is a key, and so is nothing of the command line.
    """

    def __init__(
        self,
        directory: Path,
        project: str,
        run_id: str,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        init_timeout_s: float = 30.0,
    ):
        self._wandb = _import_wandb()
        self._init_timeout_s = init_timeout_s
        directory.mkdir(parents=True, exist_ok=True)
        options = {"project": project, "id": run_id, "dir": str(directory), "config": redacted(config), "resume": "allow"}
        try:
            self._run = self._start("online", options)
        except self._wandb.errors.Error as error:
            warn(f"W&B cannot be reached ({type(error).__name__}: {error}); metrics are kept offline in {directory}/wandb.")
            self._wandb.teardown()
            self._run = self._start("offline", options)

    def __str__(self) -> str:
        return "W&B"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guarded(lambda: self._run.log(dict(metrics), step=step))

    def close(self) -> None:
        self._guarded(self._run.finish)

    def _start(self, mode: str, options: dict[str, Any]) -> Any:
        settings = self._wandb.Settings(
            init_timeout=self._init_timeout_s,
            finish_timeout=FINISH_SECONDS,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
        )
        return self._wandb.init(mode=mode, settings=settings, **options)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except self._wandb.errors.Error as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def redacted(config: Any) -> Any:
    """A copy of a configuration in which values whose names speak of keys are hidden, and so are passwords in URLs and what
    a command gets as its environment.

    >>> redacted({"max_tokens": 5, "judge": {"api_key": "sk-1"}, "url": "http://me:pw@host/v1"})
    {'max_tokens': 5, 'judge': {'api_key': '(hidden)'}, 'url': 'http://(hidden)@host/v1'}
    >>> redacted({"name": "mcp", "command": ["server"], "env": {"SEARCH_TOKEN": "1"}})
    {'name': 'mcp', 'command': ['server'], 'env': '(hidden)'}
    """
    if isinstance(config, Mapping):
        hidden = ("env",) if "command" in config else ()
        return {
            key: HIDDEN if SECRET_NAME.search(str(key)) or (key in hidden and value) else redacted(value)
            for key, value in config.items()
        }
    if isinstance(config, str):
        return re.sub(r"(?<=://)[^/@\s]+@", f"{HIDDEN}@", config)
    if isinstance(config, Sequence):
        return [redacted(item) for item in config]
    return config


def _import_wandb() -> Any:
    try:
        import wandb  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("tracking.wandb=true needs W&B. Next: pip install 'rl4llm[wandb]'.") from error
    return wandb
