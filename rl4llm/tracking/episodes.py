"""Every episode as it was sampled: what was said, the exact tokens, who wrote them, and what it was worth.

    episodes/step-000012.jsonl
        {"step": 12, "prompt_id": "7", "sample": 0, "reward": 1.0, "rewards": {"accuracy": 1.0}, "stop_reason": "done",
         "turns": 2, "tokens": 31, "credit": 0.5, "mismatch": 0.00012,
         "messages": [{"role": "user", "content": "..."}, ...], "ground_truth": "42",
         "spans": [{"author": "context", "token_ids": [...]},
                   {"author": "policy", "token_ids": [...], "logprobs": [...], "version": 11,
                    "trainer_logprobs": [...], "advantages": [...], "weight": 0.002, "clipped": [3]}], "extras": {}}
    episodes/eval-000012.jsonl
        the same, of the held-out set

What is short comes first, so that a row can be listed without reading all of it. `tokens` are those that the policy wrote,
in `turns`. What trained has the numbers of the trainer beside those of the engine: log-probs under the weights that
sampled (in later optimizer steps of the same rollout under newer ones, unless they are recomputed), the advantage of each
token, how much each counts in the loss of the step, and at which places of the span a clip cut the gradient; `mismatch` is
the largest difference of the log-probs, in nats. Episodes that had nothing to teach, and evaluations, have none of these.

An episode whose agent rewrote its history has further token records beside `spans`, as the list `forks`.
An attempt that failed has `failure`, the reason, `failure_class`, and no reward. `extras` holds what environments and
rewards noted: why a reward gave 0 (`reward_notes`), what failed before it was played again (`played_again_after`). Where
several roles speak in an episode, each that the policy plays has a row, with its `role` and whether that is `frozen`. Where
several environments are played, `part` names the one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory, count_turns
from rl4llm.tracking.jsonl import read_jsonl
from rl4llm.tracking.tokens import DIGITS, SpanNote, TrainedTokens

LONG = ("messages", "ground_truth", "spans", "forks", "extras")
"""The fields of an episode that may be long; they come last, in this order."""
Notes = Mapping[int, SpanNote]


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

    def due(self, step: int) -> bool:
        """Whether episodes of this step are stored."""
        return self._every > 0 and step % self._every == 0

    def log(
        self,
        step: int,
        groups: Sequence[Group],
        failed: Sequence[SampleState] = (),
        credits: Sequence[Sequence[Any]] | None = None,
        kind: Literal["step", "eval"] = "step",
        trained: TrainedTokens | None = None,
    ) -> None:
        """Store what a step or an evaluation sampled; `credits` holds a number per trajectory of each group, or per turn.

        `trained` knows what the trainer found for their tokens.
        """
        if self._every == 0 or (kind == "step" and not self.due(step)):
            return
        notes = trained.by_span() if trained is not None else {}
        with open(self._directory / f"{kind}-{step:06d}{self._ending}", "w") as file:
            for row in islice(_rows(groups, failed, credits, notes), self._limit):
                file.write(json.dumps(_short_first({"step": step, **row})) + "\n")


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """The episodes of one file or of a directory's files; a torn last line, which a killed run leaves, is left out."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise DataError(f"{path} holds no episodes. Accepted: an episodes directory of a run, or a .jsonl file in it.")
    return [row for file in files for row in read_jsonl(file)]


def told(groups: Sequence[Group], most: int = 8, longest: int = 4000) -> list[dict[str, str | float]]:
    """A few episodes in words, for a table: prompt, completion, reward and stop reason; long texts in part."""
    return [
        {
            "prompt": _in_words(trajectory.messages[: _first_word(trajectory)], longest),
            "completion": _in_words(trajectory.messages[_first_word(trajectory) :], longest),
            "reward": trajectory.reward,
            "stop_reason": trajectory.stop_reason,
        }
        for trajectory in islice((one for group in groups for one in group.trajectories), most)
    ]


def _first_word(trajectory: Trajectory) -> int:
    """Where the policy begins to speak; a prompt may hold answers of an assistant too."""
    answers = [number for number, message in enumerate(trajectory.messages) if message.role == "assistant"]
    turns = min(trajectory.num_turns, len(answers))
    return answers[-turns] if turns else len(trajectory.messages)


def _in_words(messages: Sequence[ChatMessage], longest: int) -> str:
    text = "\n".join(
        f"{message.role}: {message.content or ''}{json.dumps(message.tool_calls) if message.tool_calls else ''}"
        for message in messages
    )
    return text if len(text) <= longest else f"{text[:longest]} ... ({len(text) - longest:,} more characters)"


def _short_first(row: Mapping[str, Any]) -> dict[str, Any]:
    short = {name: value for name, value in row.items() if name not in LONG}
    return short | {name: row[name] for name in LONG if name in row}


def _rows(
    groups: Sequence[Group], failed: Sequence[SampleState], credits: Sequence[Sequence[Any]] | None, notes: Notes
) -> Iterator[dict[str, Any]]:
    for sample in failed:
        yield _failed(sample)
    for number, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            row = _finished(trajectory, index, notes) | ({"frozen": group.frozen} if group.role else {})
            yield row if credits is None else {**row, "credit": credits[number][index]}


def _finished(trajectory: Trajectory, index: int, notes: Notes) -> dict[str, Any]:
    extras = dict(trajectory.extras)
    return {
        "prompt_id": trajectory.prompt_id,
        **({"part": trajectory.part} if trajectory.part else {}),
        **({"role": trajectory.role} if trajectory.role else {}),
        "sample": extras.pop("sample", index),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "stop_reason": trajectory.stop_reason,
        "ground_truth": _plain(extras.pop("ground_truth", None)),
        "messages": [message.to_dict() for message in trajectory.messages],
        **_tokens(trajectory.spans, trajectory.forks, notes),
        "extras": _plain(extras),
    }


def _failed(sample: SampleState) -> dict[str, Any]:
    return {
        "prompt_id": sample.prompt_id,
        **({"part": sample.part} if sample.part else {}),
        **({"role": sample.role} if sample.role else {}),
        "sample": sample.index,
        "failure": sample.failure or "unknown",
        "failure_class": sample.failure_class,
        "stop_reason": sample.stop_reason,
        "ground_truth": _plain(sample.ground_truth),
        "messages": [message.to_dict() for message in sample.messages],
        **_tokens(sample.spans, sample.forks),
        "extras": _plain(sample.extras),
    }


def _tokens(
    spans: Sequence[TokenSpan], forks: Sequence[Sequence[TokenSpan]], notes: Notes | None = None
) -> dict[str, Any]:
    """The token records of an episode, and what is counted in them."""
    notes, records = notes or {}, (spans, *forks)
    written = [span for record in records for span in record if span.author == "policy"]
    first, *others = ([_span(span, notes.get(id(span))) for span in record] for record in records)
    return {
        "turns": sum(map(count_turns, records)),
        "tokens": sum(len(span.token_ids) for span in written),
        **_mismatch(written, notes),
        "spans": first,
        **({"forks": others} if others else {}),
    }


def _mismatch(written: Sequence[TokenSpan], notes: Notes) -> dict[str, float]:
    differences = [
        abs(ours - theirs)
        for span in written
        if (note := notes.get(id(span))) is not None
        for ours, theirs in zip(note.logprobs, span.logprobs or (), strict=True)
    ]
    return {"mismatch": round(max(differences), DIGITS)} if differences else {}


def _span(span: TokenSpan, note: SpanNote | None) -> dict[str, Any]:
    row: dict[str, Any] = {"author": span.author, "token_ids": list(span.token_ids)}
    if span.author == "policy":
        row |= {"logprobs": list(span.logprobs or ()), "version": span.version}
    if note is not None:
        row |= {
            "trainer_logprobs": note.logprobs,
            "advantages": note.advantages,
            "weight": note.weight,
            "clipped": note.clipped,
        }
    return row


def _plain(value: Any) -> Any:
    """What an environment attached, as JSON where that is possible and as text where not."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        pass
    return {str(key): _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else repr(value)
