"""An engine that asks a person, and the episodes that the person plays."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4llm.core.base_client import BaseClient
from rl4llm.core.errors import EngineError, RL4LLMError
from rl4llm.core.images import ImagePlace
from rl4llm.core.sample import SampleState
from rl4llm.core.types import Completion, SamplingParams, Trajectory, WeightRef
from rl4llm.data.demonstrations import as_row
from rl4llm.envs.rollout import Rollout

CONTEXT = 1 << 20


class LeftError(EngineError):
    """The person has given up the episode."""


class BusyError(RL4LLMError):
    """There is nothing to answer, or an episode is still played."""


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A request: the text of the prompt as a model gets it, the session, and where the answer goes."""

    prompt: str
    session: str
    answer: asyncio.Future[str]


class Person(BaseClient):
    """An engine whose tokens are those of what a person writes; each answer ends the turn."""

    in_process = True

    def __init__(self, tokenizer: Any):
        self.context_length, self.vocab_size = CONTEXT, len(tokenizer)
        self._tokenizer = tokenizer
        self._waiting: list[OpenTurn] = []
        self._left = False

    @property
    def asked(self) -> OpenTurn | None:
        """Return the oldest request without an answer."""
        return next(iter(self._waiting), None)

    def begin(self) -> None:
        """Take requests again after `leave`."""
        self._left = False

    def answer(self, text: str) -> None:
        """Answer the oldest request, from any thread; raise BusyError if there is none."""
        try:
            asked = self._waiting.pop(0)
        except IndexError:
            raise BusyError("Nothing waits for an answer.") from None
        asked.answer.get_loop().call_soon_threadsafe(asked.answer.set_result, text)

    def leave(self) -> None:
        """End the episode: what it asks now and later raises LeftError."""
        self._left = True
        while self._waiting:
            asked = self._waiting.pop(0)
            asked.answer.get_loop().call_soon_threadsafe(asked.answer.set_exception, LeftError())

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        if self._left:
            raise LeftError
        if images:
            raise EngineError("generate: a prompt with images cannot be shown to a person.")
        asked = OpenTurn(
            self._tokenizer.decode(prompt_ids), session, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(asked)
        try:
            text = await asked.answer
        finally:  # another role may have ended the episode
            if asked in self._waiting:
                self._waiting.remove(asked)
        stops = sampling_params.stop_token_ids
        sampled = self._tokenizer.encode(text, add_special_tokens=False)
        end = next((place for place, token in enumerate(sampled) if token in stops), len(sampled))
        whole = end <= sampling_params.max_tokens - len(stops[:1])
        sampled = sampled[: end if whole else sampling_params.max_tokens]
        said = self._tokenizer.decode(sampled, skip_special_tokens=True)
        token_ids = (*sampled, *(stops[:1] if whole else ()))
        return Completion(said, token_ids, (0.0,) * len(token_ids), "stop" if whole else "length", version=0)

    async def score(self, token_ids: Sequence[int], images: Sequence[ImagePlace] = ()) -> list[float]:
        raise EngineError("A person has no log-probs.")

    async def load(self, weight_ref: WeightRef) -> None:
        """Do nothing: a person has no weights."""

    async def version(self) -> int:
        return 0


class Game:
    """Episodes of a rollout, one at a time, each in a new thread.

    Args:
        rollout: plays with `person`; closed by `close`.
        person: the engine of the rollout.
        sampling_params: bounds the answers, as in training.
        out: each finished episode is appended to this file, as a row that `sft` can learn from.
    """

    def __init__(
        self, rollout: Rollout, person: Person, sampling_params: SamplingParams, out: Path | None = None
    ):
        self._rollout, self._person, self._params, self._out = rollout, person, sampling_params, out
        self._thread: threading.Thread | None = None
        self._sample: SampleState | None = None
        self._ended: dict[str, Any] | None = None
        self._row = -1
        self._count = 0

    def start(self, row: int) -> None:
        """Begin an episode of a row; raise BusyError during another, and LookupError for a row that does not exist."""
        if self._thread is not None and self._thread.is_alive():
            raise BusyError("An episode is being played. Finish it, or give it up.")
        if not 0 <= row < self._rollout.num_rows:
            raise LookupError(f"There is no prompt {row}: they are 0 to {self._rollout.num_rows - 1}.")
        self._person.begin()
        self._row, self._sample, self._ended = row, None, None
        self._thread = threading.Thread(target=self._play, name="rl4llm-play", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """Return what the page shows."""
        asked = self._person.asked
        for sample in self._rollout.playing:
            if self._sample is None or (asked is not None and sample.session == asked.session):
                self._sample = sample
        shown = self._ended or ({} if self._sample is None else _shown(self._sample))
        playing = self._thread is not None and self._thread.is_alive()
        return {
            "prompts": self._rollout.num_rows,
            "row": self._row,
            "playing": playing,
            "asks": playing and asked is not None,
            "prompt": asked.prompt if asked else "",
            **shown,
        }

    def close(self) -> None:
        """Give up the episode, and release the environment."""
        self._person.leave()
        if self._thread is not None:
            self._thread.join(timeout=10)
        self._rollout.close()

    def _play(self) -> None:
        try:
            result = self._rollout.play(
                [self._row], step=self._count, sampling_params=self._params, group_size=1
            )
            self._count += 1
            trajectories = result.trajectories
            self._ended = _result(trajectories) if trajectories else {"error": str(result.failed[0].failure)}
            if self._out is not None:
                with self._out.open("a", encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(as_row(one))}\n" for one in trajectories)
        except LeftError:
            self._ended = {"error": "You gave up this episode. It is not stored."}
        except (RL4LLMError, OSError) as error:
            self._ended = {"error": str(error)}


def _shown(sample: SampleState) -> dict[str, Any]:
    return {"role": sample.role, "messages": [message.to_dict() for message in list(sample.messages)]}


def _result(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the end of an episode; of several roles, the messages are those of the first."""
    first = trajectories[0]
    roles = [
        {"role": one.role, "reward": one.reward, "rewards": dict(one.rewards), "stop_reason": one.stop_reason}
        for one in trajectories
    ]
    messages = [message.to_dict() for message in first.messages]
    return {"messages": messages, "ground_truth": first.extras["ground_truth"], "result": roles}
