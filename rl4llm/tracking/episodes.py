"""Every episode as it was sampled: what was said, the exact tokens, who wrote them, and what it was worth.

    episodes/step-000012.jsonl
        {"step": 12, "prompt_id": "7", "sample": 0, "reward": 1.0, "rewards": {"accuracy": 1.0}, "credit": 0.5,
         "stop_reason": "done", "ground_truth": "42", "messages": [{"role": "user", "content": "..."}, ...],
         "spans": [{"author": "context", "token_ids": [...]},
                   {"author": "policy", "token_ids": [...], "logprobs": [...], "version": 11}], "extras": {}}
    episodes/eval-000012.jsonl
        the same, of the held-out set

An episode whose agent rewrote its history has further token records beside `spans`, as the list `forks`.
An attempt that failed has `failure`, the reason, `failure_class`, and no reward. `extras` holds what environments and
rewards noted: why a reward gave 0 (`reward_notes`), what failed before it was played again (`played_again_after`). Where
several roles speak in an episode, each that the policy plays has a row, with its `role` and whether that is `frozen`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import DataError
from rl4llm.core.types import Group, TokenSpan, Trajectory
from rl4llm.tracking.jsonl import read_jsonl


class EpisodeLog:
    """Stores episodes of every `every`-th step (0: of none) and of each evaluation, at most `max_per_step` (0: all).

    Failed attempts come first, then whole groups. Ranks other than 0 write files of their own. Files of steps after
    `resume_step` are deleted: those steps are taken again.
    """

    def __init__(self, directory: Path, every: int = 1, max_per_step: int = 0, resume_step: int = -1, rank: int = 0):
        self._directory = directory
        self._every = every
        self._limit = max_per_step or None
        self._ending = f"-rank{rank}.jsonl" if rank else ".jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.glob("*.jsonl"):
            if int(file.stem.split("-")[1]) > resume_step and (rank == 0 or file.name.endswith(self._ending)):
                file.unlink(missing_ok=True)

    def log(
        self,
        step: int,
        groups: Sequence[Group],
        failed: Sequence[SampleState] = (),
        credits: Sequence[Sequence[Any]] | None = None,
        kind: Literal["step", "eval"] = "step",
    ) -> None:
        """Store what a step or an evaluation sampled; `credits` holds a number per trajectory of each group, or per turn."""
        if self._every == 0 or (kind == "step" and step % self._every):
            return
        with open(self._directory / f"{kind}-{step:06d}{self._ending}", "w") as file:
            for row in islice(_rows(groups, failed, credits), self._limit):
                file.write(json.dumps({"step": step, **row}) + "\n")


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """The episodes of one file or of a directory's files; a torn last line, which a killed run leaves, is left out."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise DataError(f"{path} holds no episodes. Accepted: an episodes directory of a run, or a .jsonl file in it.")
    return [row for file in files for row in read_jsonl(file)]


def _rows(
    groups: Sequence[Group], failed: Sequence[SampleState], credits: Sequence[Sequence[Any]] | None
) -> Iterator[dict[str, Any]]:
    for sample in failed:
        yield _failed(sample)
    for number, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            row = _finished(trajectory, index) | ({"frozen": group.frozen} if group.role else {})
            yield row if credits is None else {**row, "credit": credits[number][index]}


def _finished(trajectory: Trajectory, index: int) -> dict[str, Any]:
    extras = dict(trajectory.extras)
    return {
        "prompt_id": trajectory.prompt_id,
        **({"role": trajectory.role} if trajectory.role else {}),
        "sample": extras.pop("sample", index),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "stop_reason": trajectory.stop_reason,
        "ground_truth": _plain(extras.pop("ground_truth", None)),
        "messages": [message.to_dict() for message in trajectory.messages],
        "spans": [_span(span) for span in trajectory.spans],
        **_forks(trajectory.forks),
        "extras": _plain(extras),
    }


def _failed(sample: SampleState) -> dict[str, Any]:
    return {
        "prompt_id": sample.prompt_id,
        **({"role": sample.role} if sample.role else {}),
        "sample": sample.index,
        "failure": sample.failure or "unknown",
        "failure_class": sample.failure_class,
        "stop_reason": sample.stop_reason,
        "ground_truth": _plain(sample.ground_truth),
        "messages": [message.to_dict() for message in sample.messages],
        "spans": [_span(span) for span in sample.spans],
        **_forks(sample.forks),
        "extras": _plain(sample.extras),
    }


def _forks(forks: Sequence[Sequence[TokenSpan]]) -> dict[str, Any]:
    return {"forks": [[_span(span) for span in record] for record in forks]} if forks else {}


def _span(span: TokenSpan) -> dict[str, Any]:
    row: dict[str, Any] = {"author": span.author, "token_ids": list(span.token_ids)}
    if span.author == "policy":
        row |= {"logprobs": list(span.logprobs or ()), "version": span.version}
    return row


def _plain(value: Any) -> Any:
    """What an environment attached, as JSON where that is possible and as text where not."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        pass
    return {str(key): _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else repr(value)
