"""Where metrics go. A tracker that fails is told once and never stops training."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rl4llm.core.errors import ConfigError, DataError, RunDirError

Row = Mapping[str, str | float]


class Tracker(ABC):
    """Takes what a run logs, in the order of steps. Its methods may raise OSError, see `Tolerant`; none waits for a network.

    Pictures and tables are for those who can show them: by default they are let go.
    """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; those of its evaluation, whose names begin with "eval/", come in a second call."""

    def picture(self, step: int, name: str, file: Path) -> None:
        """Keep a PNG, in the place of what had this name before."""

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Keep rows, which all have the same columns."""

    def close(self) -> None:
        """Write out what is pending."""


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError when the package of a tracker, which has its name, cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"tracking.{name}=true: {error}. Next: pip install 'rl4llm[{name}]'.") from error


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


class Trackers(Tracker):
    """Several trackers as one; the failure of one holds up neither the others nor training."""

    def __init__(self, trackers: Sequence[Tracker], tolerant: Tolerant):
        self._trackers = tuple(trackers)
        self._tolerant = tolerant

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def picture(self, step: int, name: str, file: Path) -> None:
        self._each(lambda tracker: tracker.picture(step, name, file))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        self._each(lambda tracker: tracker.table(step, name, rows))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            with self._tolerant(str(tracker)):
                tell(tracker)
