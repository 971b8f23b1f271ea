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
        self._of: tuple[Path, str] | None = None  # a run, and the page that the answers are shown on
        self._talk: Any = None

    def ask(self, run: Path, page: str, line: str) -> dict[str, Any]:
        """Return the messages that follow a line, and whether it began a conversation, which empties a page's log.

        It does for another run, for another page than before, and after an error.
        """
        with self._lock:
            began = self._of != (run, page)
            if self._of is None or run != self._of[0]:
                self._close()
                conversation = from_extension("conversation", "A conversation with a run")
                self._talk = self._opened.enter_context(conversation(str(run)))
            elif began:
                self._talk.reset()
            self._of = run, ""  # until there is an answer
            messages = [message.to_dict() for message in self._talk.ask(line)]
            self._of = run, page
            return {"began": began, "messages": messages}

    def close(self) -> None:
        """End the conversation, and free its model."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._of = None
        self._opened.close()
