"""Episodes of a checkpoint: what has been played and not trained, so that a resumed run does not play it again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4llm.core.errors import DataError
from rl4llm.core.images import Image, ImagePlace, Picture
from rl4llm.core.sample import EpisodeState, Line, SampleState
from rl4llm.core.types import ChatMessage, Origin, TokenSpan

if TYPE_CHECKING:
    from rl4llm.envs.rollout import Episodes
    from rl4llm.envs.stream import Round

PLAIN = (
    "init_msg_size", "current_step", "done", "stop_reason", "failure", "failure_class", "extras", "session",
)  # fmt: skip
"""Fields of a sample that are JSON values, unless an environment attaches objects to `extras`."""


def write_played(path: Path, rounds: Iterable[Round]) -> None:
    """Write the units of some rounds that have been played and not taken, one a line."""
    with open(path, "w") as file:
        for number, round_ in enumerate(rounds):
            for place, unit in round_.untaken():
                if is_played(unit) and (text := dump(unit)) is not None:
                    file.write(f'{{"round": {number}, "place": {place}, "samples": {text}}}\n')


def read_played(files: Iterable[Path], rounds: Iterable[Round], share: int, oldest: int) -> int:
    """Take over into the same rounds what these files have of them; return the number of draws.

    A step trains `share` draws. What trains in the next one may have no version before `oldest`, in the one after that none
    before `oldest + 1`, and so on. Other units are left to be played again.
    """
    units, ahead, played = {}, 0, 0
    for number, round_ in enumerate(rounds):
        for place, unit in round_.untaken():
            units[number, place] = unit, oldest + (ahead + place - round_.taken) // share
        ahead += round_.left
    for file in files:
        for row in map(json.loads, file.open()):
            waiting = units.get((row["round"], row["place"]))
            if waiting is not None and take_over(waiting[0], row["samples"], oldest=waiting[1]):
                played += len(waiting[0].all) // waiting[0].size
    return played


def is_played(unit: Episodes) -> bool:
    """Return whether a unit has been played and scored, without an error."""
    return unit.outcome.done() and unit.outcome.exception() is None


def take_over(unit: Episodes, rows: Sequence[Mapping[str, Any]], oldest: int) -> bool:
    """Give a new unit the episodes that `dump` wrote; return False if they are others or older than `oldest`, or if an
    image of theirs is no longer among those of the run."""
    copies = [begin() for begin in unit.begin]
    samples = [sample for episode in copies for sample in episode]
    names = [name for reward in unit.rollout.env.reward_functions for name in reward.score_names]
    try:
        if not fill(samples, rows, unit.rollout.env.vision):
            return False
    except DataError:
        return False
    if any(list(seat.rewards or names) != names for seat in samples):
        return False
    if any((span.version or 0) < oldest for sample in samples for span in sample.policy_spans):
        return False
    unit.all = copies
    unit.outcome.set_result(None)
    return True


def dump(unit: Episodes) -> str | None:
    """Return a played unit as JSON text; None if it would not come back equal, as with objects in `extras`.

    Images are stored by their digest; a picture that is not the prompt's comes back as the policy saw it.
    """
    vision = unit.rollout.env.vision
    try:
        rows = [_row(sample, vision) for sample in unit.samples]
        text = json.dumps(rows)
        copies = [sample for begin in unit.begin for sample in begin()]
        same = fill(copies, json.loads(text), vision) and [_row(sample, vision) for sample in copies] == rows
    except (TypeError, ValueError, RecursionError, DataError):
        return None
    return text if same else None


def fill(samples: Sequence[SampleState], rows: Sequence[Mapping[str, Any]], vision: Any) -> bool:
    """Give new samples what `dump` wrote of them; return False if it belongs to other episodes.

    `vision` is the environment's. Raises DataError for an image that is not in its store.
    """
    if [(row["prompt_id"], row["index"]) for row in rows] != [
        (item.prompt_id, item.index) for item in samples
    ]:
        return False
    for sample, row in zip(samples, rows, strict=True):
        lines, begin = row["messages"], len(sample.messages)
        same = [_said(message, vision) for message in sample.messages] == lines[:begin]
        if not same and not row["own_prompt"]:
            return False
        same_messages = sample.messages if same else []
        sample.messages = [*same_messages, *(_message(item, vision) for item in lines[len(same_messages) :])]
        for name in PLAIN:
            setattr(sample, name, row[name])
        sample.spans, *forks = ([span_of(*span) for span in record] for record in row["records"])
        origins = [origin and Origin(*origin) for origin in row["origins"]]
        sample.special = replace(sample.special, forks=forks, origins=origins, own_prompt=row["own_prompt"])
        sample.turn_rewards = dict(row["turn_rewards"])
        if row["rewards"] is not None:
            sample.rewards = {
                name: math.nan if item is None else item for name, item in row["rewards"].items()
            }
        if isinstance(sample.episode, EpisodeState):
            sample.episode.said[:] = (Line(*line) for line in row["said"])
    return True


def _row(sample: SampleState, vision: Any = None) -> dict[str, Any]:
    rewards = sample.rewards
    return {
        "prompt_id": sample.prompt_id,
        "index": sample.index,
        **{name: getattr(sample, name) for name in PLAIN},
        "messages": [_said(message, vision) for message in sample.messages],
        "records": [[span_row(span) for span in record] for record in (sample.spans, *sample.special.forks)],
        "origins": [origin and astuple(origin) for origin in sample.special.origins],
        "own_prompt": sample.special.own_prompt,
        "turn_rewards": list(sample.turn_rewards.items()),
        "rewards": rewards
        and {name: None if math.isnan(reward) else reward for name, reward in rewards.items()},
        "said": sample.episode.said if sample.episode else [],
    }


def _said(message: ChatMessage, vision: Any) -> dict[str, Any]:
    calls = message.tool_calls
    return {
        **{part.name: getattr(message, part.name) for part in fields(message)},
        "tool_calls": None if calls is None else list(calls),
        "parts": [
            part if isinstance(part, str) or vision is None else _named(vision.see(part))
            for part in message.parts
        ],
    }


def _named(image: Image) -> list[Any]:
    return [image.digest, image.height, image.width]


def _message(row: Mapping[str, Any], vision: Any) -> ChatMessage:
    calls, parts = row["tool_calls"], row["parts"]
    images = tuple(
        part if isinstance(part, str) else Picture(vision.store.png(Image(*part))) for part in parts
    )
    return ChatMessage(**{**row, "tool_calls": None if calls is None else tuple(calls), "parts": images})


def span_row(span: TokenSpan) -> list[Any]:
    """Return a span as JSON values; the places of its images and its grammar come last, if it has any."""
    places = [[_named(image.image), image.offset, image.length] for image in span.images]
    rest = [places, span.grammar] if span.grammar else [places] if places else []
    return [span.author, span.token_ids, span.logprobs, span.version, *rest]


def span_of(
    author: Any,
    token_ids: list[int],
    logprobs: list[float] | None,
    version: int | None,
    places: Any = (),
    grammar: str = "",
) -> TokenSpan:
    """Return the span that `span_row` wrote."""
    images = tuple(ImagePlace(Image(*image), offset, length) for image, offset, length in places)
    sampled = None if logprobs is None else tuple(logprobs)
    return TokenSpan(tuple(token_ids), author, sampled, version, images, grammar)
