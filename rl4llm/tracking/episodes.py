"""The log of episodes: messages, exact tokens, who wrote them, and rewards.

    episodes/step-000012.jsonl
        {"step": 12, "prompt_id": "7", "sample": 0, "reward": 1.0, "rewards": {"math": 1.0}, "success": true,
         "stop_reason": "done", "turns": 2, "tokens": 31, "credit": 0.5, "mismatch": 0.00012,
         "messages": [{"role": "user", "content": "..."}, ...], "ground_truth": "42",
         "spans": [{"author": "context", "token_ids": [...]},
                   {"author": "policy", "token_ids": [...], "logprobs": [...], "version": 11,
                    "trainer_logprobs": [...], "advantages": [...], "weight": 0.002, "clipped": [3]}], "extras": {}}
    episodes/eval-000012.jsonl
        the same, of the held-out set

Short fields come first, so that a reader can list a row without reading all of it. `tokens` counts what the policy wrote in
`turns`. Spans that trained also have numbers of the trainer: log-probs under the weights that sampled (in later optimizer
steps of the same rollout under newer ones, unless they are recomputed), the advantage of each token, its weight in the loss,
and the places where a clip cut the gradient. `mismatch` is the largest difference of the log-probs, in nats. Episodes that
did not train, and evaluations, have none of these.

`success` is left out if no reward defines success. A tool's message is `failed` if the call went wrong, and has that call
as its `tool_calls`, where the environment knows it, and how many `seconds` it took, where the environment runs it.
An episode whose history was rewritten has further token records beside `spans`, as the list `forks`, and where each begins
as the list `origins`, such as {"relation": "continues", "record": 0, "turn": 3}, see `rl4llm.core.types.Origin`.
An attempt that failed has `failure`, the reason, `failure_class`, and no reward. `extras` has notes of environments and
rewards: why a reward was 0 (`reward_notes`), what failed before a retry (`played_again_after`). In an episode of several
roles, each role of the policy has a row, with its `role` and whether it is `frozen`. In an environment mixture, `part` names
the environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl4llm.core.base_env import SampleState, Special
from rl4llm.core.images import ImagePlace
from rl4llm.core.types import ChatMessage, Group, TokenSpan, TrainBatch, Trajectory, count_turns, images_of

LONG = ("messages", "ground_truth", "spans", "forks", "origins", "extras")
"""The fields of an episode that may be long; they come last, in this order."""
DIGITS = 6  # of nats; those of an fp32 log-prob that mean something
Notes = Mapping[int, "SpanNote"]


class EpisodeLog:
    """Stores episodes of every `every`-th step (0: of none) and of each evaluation, at most `max_per_step` (0: all).

    Failed samples come first, then whole groups. Ranks other than 0 write separate files. Files of steps after
    `resume_step` are deleted, since the run repeats those steps.
    """

    def __init__(
        self, directory: Path, every: int = 1, max_per_step: int = 0, resume_step: int = -1, rank: int = 0
    ):
        self._directory = directory
        self._every = every
        self._limit = max_per_step or None
        self._ending = f"-rank{rank}.jsonl" if rank else ".jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.glob("*.jsonl"):
            if int(file.stem.split("-")[1]) > resume_step and (rank == 0 or file.name.endswith(self._ending)):
                file.unlink(missing_ok=True)

    def due(self, step: int) -> bool:
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
                short = {name: value for name, value in row.items() if name not in LONG}
                long = {name: row[name] for name in LONG if name in row}
                file.write(json.dumps({"step": step, **short, **long}) + "\n")


@dataclass(slots=True)
class SpanNote:
    """Of one span of the policy: the trainer's log-prob of each token (nats), its advantage, what each counts in the loss of
    the step, and the places in the span at which a clip cut the gradient."""

    logprobs: list[float]
    advantages: list[float]
    weight: float
    clipped: list[int]


class TrainedTokens:
    """Gathers the passes of one step, and sorts them by span when the step is over.

        trained.add(update.records, batch, logprobs_BT, clipped_BT)
        trained.by_span()[id(span)].advantages

    A token that trains several times keeps the numbers of its first pass; it is clipped if any pass clipped it.
    """

    def __init__(self) -> None:
        self._passes: list[
            tuple[Sequence[tuple[TokenSpan, ...]], TrainBatch, Tensor, Tensor, Tensor | None]
        ] = []

    def add(
        self,
        records: Sequence[tuple[TokenSpan, ...]],
        batch: TrainBatch,
        logprobs_BT: Tensor,
        clipped_BT: Tensor | None = None,
    ) -> None:
        """Note a micro-batch; `clipped_BT` is 1 where a clip cut the gradient, None where nothing clips. No copy is made."""
        if batch.record_ids_BT is not None:
            clipped_BT = None if clipped_BT is None else clipped_BT.detach()
            self._passes.append((records, batch, batch.record_ids_BT, logprobs_BT.detach(), clipped_BT))

    def by_span(self) -> dict[int, SpanNote]:
        """Return the notes of all spans that trained, by the `id` of the span."""
        notes: dict[int, SpanNote] = {}
        for passed in self._passes:
            for span, note in _notes_of(*passed):
                merged = notes.setdefault(id(span), note)
                merged.clipped = sorted({*merged.clipped, *note.clipped})
        return notes


def episode_rows(groups: Sequence[Group], most: int = 8, longest: int = 4000) -> list[dict[str, str | float]]:
    """Return a few episodes as text for a table: prompt, completion, reward and stop reason; long texts are cut."""
    return [
        {
            "prompt": _in_words(trajectory.messages[: _first_word(trajectory)], longest),
            "completion": _in_words(trajectory.messages[_first_word(trajectory) :], longest),
            "reward": trajectory.reward,
            "stop_reason": trajectory.stop_reason,
        }
        for trajectory in islice((item for group in groups for item in group.trajectories), most)
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


def _rows(
    groups: Sequence[Group],
    failed: Sequence[SampleState],
    credits: Sequence[Sequence[Any]] | None,
    notes: Notes,
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
        **({} if trajectory.success is None else {"success": trajectory.success}),
        "stop_reason": trajectory.stop_reason,
        "ground_truth": _plain(extras.pop("ground_truth", None)),
        "messages": _messages(trajectory.messages, (trajectory.spans, *trajectory.forks)),
        **_tokens(trajectory.spans, trajectory, notes),
        "extras": _plain(extras),
    }


def _failed(sample: SampleState) -> dict[str, Any]:
    return {
        "prompt_id": sample.prompt_id,
        **({"part": sample.special.part} if sample.special.part else {}),
        **({"role": sample.role} if sample.role else {}),
        "sample": sample.index,
        "failure": sample.failure or "unknown",
        "failure_class": sample.failure_class,
        "stop_reason": sample.stop_reason,
        "ground_truth": _plain(sample.ground_truth),
        "messages": _messages(sample.messages, (sample.spans, *sample.special.forks)),
        **_tokens(sample.spans, sample.special),
        "extras": _plain(sample.extras),
    }


def _messages(
    messages: Sequence[ChatMessage], records: Sequence[Sequence[TokenSpan]]
) -> list[dict[str, Any]]:
    """Return the messages of an episode; of an image that the policy saw, the digest, which names its file in the run."""
    places = [images_of(record) for record in records]
    in_turn = images_of([*records[0], *(span for record in records[1:] for span in record[1:])])
    count = sum(len(message.pictures) for message in messages)
    longest: Sequence[ImagePlace] = max(places, key=len)
    seen = iter(in_turn if len(in_turn) == count else longest)
    rows = []
    for message in messages:
        row = message.to_dict() | ({"failed": True} if message.failed else {})
        if message.seconds is not None:
            row["seconds"] = round(message.seconds, DIGITS)
        if message.tool_calls:  # of a tool's message, the call that it answers
            row["tool_calls"] = [dict(call) for call in message.tool_calls]
        if message.parts:
            row["parts"] = [
                part if isinstance(part, str) else _image(next(seen, None)) for part in message.parts
            ]
        rows.append(row)
    return rows


def _image(place: ImagePlace | None) -> dict[str, Any]:
    return {"type": "image", "digest": None if place is None else place.image.digest}


def _tokens(
    spans: Sequence[TokenSpan], further: Trajectory | Special, notes: Notes | None = None
) -> dict[str, Any]:
    """Return the token records of an episode, and what is counted in them."""
    notes, records = notes or {}, (spans, *further.forks)
    written = [span for record in records for span in record if span.author == "policy"]
    differences = [
        abs(ours - theirs)
        for span in written
        if (note := notes.get(id(span))) is not None
        for ours, theirs in zip(note.logprobs, span.logprobs or (), strict=True)
    ]
    main, *branches = ([_span(span, notes.get(id(span))) for span in record] for record in records)
    return {
        "turns": sum(map(count_turns, records)),
        "tokens": sum(len(span.token_ids) for span in written),
        **({"mismatch": round(max(differences), DIGITS)} if differences else {}),
        "spans": main,
        **({"forks": branches} if branches else {}),
        **({"origins": [item and asdict(item) for item in further.origins]} if further.origins else {}),
    }


def _span(span: TokenSpan, note: SpanNote | None) -> dict[str, Any]:
    row: dict[str, Any] = {"author": span.author, "token_ids": list(span.token_ids)}
    if span.author == "policy":
        row |= {"logprobs": list(span.logprobs or ()), "version": span.version}
    if span.grammar:
        row["grammar"] = span.grammar
    if span.images:
        row["images"] = [[place.image.digest, place.offset, place.length] for place in span.images]
    if note is not None:
        row |= {
            "trainer_logprobs": note.logprobs,
            "advantages": note.advantages,
            "weight": note.weight,
            "clipped": note.clipped,
        }
    return row


def _plain(value: Any) -> Any:
    """Return what an environment attached, as JSON where that is possible, else as text."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        pass
    return (
        {str(key): _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else repr(value)
    )


def _notes_of(
    records: Sequence[tuple[TokenSpan, ...]],
    batch: TrainBatch,
    record_ids_BT: Tensor,
    logprobs_BT: Tensor,
    clipped_BT: Tensor | None,
) -> Iterator[tuple[TokenSpan, SpanNote]]:
    """Yield the spans whose tokens all train, each with its note."""
    mask_BT = _array(batch.mask_BT)
    record_ids, positions = (
        _array(ids_BT)[mask_BT].tolist() for ids_BT in (record_ids_BT, batch.position_ids_BT)
    )
    places = {key: place for place, key in enumerate(zip(record_ids, positions, strict=True))}

    def numbers(values_BT: Tensor) -> NDArray[Any]:
        return _array(values_BT.expand_as(batch.mask_BT))[mask_BT]

    logprobs, advantages = (
        np.round(numbers(values_BT).astype(np.float64), DIGITS)
        for values_BT in (logprobs_BT, batch.advantages_BT)
    )
    weights = numbers(batch.weights_BT)
    clipped = numbers(clipped_BT) > 0 if clipped_BT is not None else np.zeros(len(places), bool)
    for i in sorted({*record_ids}):
        keys = zip(repeat(i), count())
        for span in records[i]:
            chosen = [places.get(key, -1) for key in islice(keys, len(span.token_ids))]
            if span.author != "policy" or min(chosen, default=-1) < 0:
                continue
            yield (
                span,
                SpanNote(
                    logprobs[chosen].tolist(),
                    advantages[chosen].tolist(),
                    float(weights[chosen[0]]),
                    np.flatnonzero(clipped[chosen]).tolist(),
                ),
            )


def _array(values: Tensor) -> NDArray[Any]:
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()
