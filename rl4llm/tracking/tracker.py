"""Where metrics go. A tracker that fails is told once and never stops training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rl4llm.core.errors import DataError, RunDirError


class Tracker(Protocol):
    """Takes the metrics of each step, in the order of steps. May raise OSError, see `Tolerant`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Write out what is pending."""
        ...


class Tolerant:
    """Lets the writing of logs fail: the first failure of each name is handed to `warn`, the later ones are only counted.

        with tolerant("metrics.jsonl"):
            tracker.log(step, metrics)
    """

    def __init__(self, warn: Callable[[str], None]):
        self._warn = warn
        self.failures: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run one write under this name."""
        try:
            yield
        except (OSError, RunDirError, DataError) as error:
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == 1:
                self._warn(f"{name} cannot be written ({error}). Training goes on; what is missed there stays missing.")


class Trackers:
    """Several trackers as one; the failure of one holds up neither the others nor training."""

    def __init__(self, trackers: Sequence[Tracker], tolerant: Tolerant):
        self._trackers = tuple(trackers)
        self._tolerant = tolerant

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            with self._tolerant(str(tracker)):
                tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            with self._tolerant(str(tracker)):
                tracker.close()
