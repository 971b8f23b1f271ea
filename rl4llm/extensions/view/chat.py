"""A conversation with the model of a run, which the page's panel continues line by line."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl4llm.core.registry import from_extension


class Chat:
    """One conversation at a time; its model is loaded at the first line, so that it has the run's newest weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._run: Path | None = None
        self._talk: Any = None

    def ask(self, run: Path, line: str) -> list[dict[str, Any]]:
        """Return the messages that follow a line; one for another run begins a new conversation."""
        with self._lock:
            if run != self._run:
                self._close()
                conversation = from_extension("conversation", "A conversation with a run")
                self._talk, self._run = self._opened.enter_context(conversation(str(run))), run
            return [message.to_dict() for message in self._talk.ask(line)]

    def close(self) -> None:
        """End the conversation, and free its model."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._run = None
        self._opened.close()
