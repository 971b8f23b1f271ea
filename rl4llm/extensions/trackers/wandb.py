"""Metrics for Weights & Biases; without a network or a key they are stored in files for a later `wandb sync`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from rl4llm.core.redact import redacted
from rl4llm.tracking.tracker import Row, TrackedRun, Tracker

FINISH_SECONDS = 60.0


class WandbTracker(Tracker):
    """Logs to the W&B run `run_id`; a resumed run continues it. W&B keeps the first value of a repeated step.

    `config` is shown in W&B without values whose name indicates a key; the command line is not sent. WANDB_MODE and
    W&B's other variables apply. If W&B cannot be reached, it continues as with WANDB_MODE=offline.
    """

    def __init__(self, run: TrackedRun, init_timeout_s: float = 30.0):
        self._init_timeout_s = init_timeout_s
        run.directory.mkdir(parents=True, exist_ok=True)
        options = {
            "project": run.project,
            "id": run.run_id,
            "dir": str(run.directory),
            "resume": "allow",
            "config": redacted(run.config),
            "allow_val_change": True,  # a resumed run may have changed some values
        }
        try:
            self._run = self._start(None, options)
        except wandb.errors.Error as error:
            run.warn(
                f"W&B cannot be reached ({type(error).__name__}: {error}); metrics are stored offline in "
                f"{run.directory}/wandb."
            )
            wandb.teardown()
            self._run = self._start("offline", options)

    def __str__(self) -> str:
        return "W&B"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guarded(lambda: self._run.log(dict(metrics), step=step))

    def picture(self, step: int, name: str, file: Path) -> None:
        self._guarded(lambda: self._run.log({name: wandb.Image(str(file))}, step=step))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        columns: list[str | int] = list(rows[0])
        data = [list(row.values()) for row in rows]
        self._guarded(lambda: self._run.log({name: wandb.Table(columns=columns, data=data)}, step=step))

    def close(self) -> None:
        self._guarded(self._run.finish)

    def _start(self, mode: Literal["offline"] | None, options: dict[str, Any]) -> Any:
        settings = wandb.Settings(
            init_timeout=self._init_timeout_s,
            finish_timeout=FINISH_SECONDS,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
        )
        return wandb.init(mode=mode, settings=settings, **options)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except wandb.errors.Error as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
