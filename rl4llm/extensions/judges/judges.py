"""Judges: rewards that read what all roles of an episode wrote, and score each role."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4llm.core.base_env import Line, RewardExample, SampleState
from rl4llm.core.base_reward import BaseBatchReward
from rl4llm.core.errors import ConfigError
from rl4llm.core.schema import checked
from rl4llm.core.types import ChatMessage
from rl4llm.rewards.ask import as_list, as_number
from rl4llm.rewards.callables import RewardLike, as_reward_function
from rl4llm.runtime.runner import awaited


@dataclass(frozen=True, slots=True)
class Case:
    """What a judge decides on: the lines of an episode, and its row."""

    transcript: Sequence[Line]
    ground_truth: Any
    columns: Mapping[str, Any]


class BaseJudge(BaseBatchReward):
    """A reward that scores all roles of an episode at once.

        class MoreWords(BaseJudge):
            def judge(self, transcript, ground_truth, **columns):
                words = Counter()
                for line in transcript:
                    words[line.role] += len(set(line.text.split()))
                return {role: count / words.total() for role, count in words.items()}

    Each line has `role` and `text`. An episode is left out for all of its roles, and never scored 0, if the judge
    raises, if its verdict is not a mapping, or if a role that spoke has no finite number in it.
    """

    needs_roles = True

    @abstractmethod
    def judge(self, transcript: Sequence[Line], ground_truth: Any, **columns: Any) -> Mapping[str, float]:
        """Return the score of each role. May be async: then all episodes of a batch are judged at once."""

    def judge_all(self, cases: Sequence[Case]) -> Sequence[Any]:
        """Return the verdicts of many episodes, in order. Override it if a batch is cheaper than one call each."""
        return awaited([self.judge(case.transcript, case.ground_truth, **case.columns) for case in cases])

    def score_batch(self, samples: Sequence[SampleState]) -> list[Any]:
        """Return each role's part of the verdict on its episode; each episode is judged once."""
        cases = {id(sample.columns["transcript"]): _case(sample) for sample in samples}
        judged = as_list(self.name, self.judge_all(list(cases.values())), len(cases))
        verdicts = dict(zip(cases, judged, strict=True))
        pairs = [(sample.columns["role"], verdicts[id(sample.columns["transcript"])]) for sample in samples]
        return [verdict.get(role) if isinstance(verdict, Mapping) else verdict for role, verdict in pairs]


class Winner(BaseJudge):
    """1.0 for the role whose last line is right, else 0.0; if several are right, for the one that was right first.

    Args:
        name: name of the score in the logs.
        by: the reward that decides what is right; it scores each line as a whole reply.
        at_least: the lowest score of a right line.
    """

    rewards_among_options = ("by",)

    @checked("rewards.{name}")
    def __init__(self, name: str = "winner", *, by: RewardLike = "math", at_least: float = 1.0):
        super().__init__(name)
        self.by = as_reward_function(by)
        if self.by.per_turn or self.by.needs_roles:
            raise ConfigError(f"rewards.{name}.by={self.by.name!r} does not score single replies.")
        self.parts = (self.by,)
        self.score_timeout_s = self.by.score_timeout_s
        self.at_least = at_least

    def judge(self, transcript: Sequence[Line], ground_truth: Any, **columns: Any) -> Any:
        return self.judge_all([Case(transcript, ground_truth, columns)])[0]

    def judge_all(self, cases: Sequence[Case]) -> list[Any]:
        """Return a verdict for each case, or what `by` returned instead of a number."""
        lines = [_reply(case, line) for case in cases for line in case.transcript]
        scores = iter(as_list(self.by.name, self.by.score_batch(lines), len(lines)) if lines else [])
        return [self._verdict(case, [next(scores) for _ in case.transcript]) for case in cases]

    def examples(self) -> Sequence[RewardExample]:
        """Return a debate in which the role that is wrong in the end loses."""
        lines = [Line("pro", "Answer: 4"), Line("con", "Answer: 5")]
        reply = [ChatMessage("assistant", lines[0].text)]
        return [
            RewardExample(reply, "4", score, {"role": role, "transcript": lines})
            for role, score in (("pro", 1.0), ("con", 0.0))
            if self.by.name == "math"
        ]

    def _verdict(self, case: Case, scores: Sequence[Any]) -> Any:
        broken = [score for score in scores if not math.isfinite(as_number(score))]
        if broken:
            return broken[0]
        right: dict[str, int] = {}  # roles whose last line is right, and since which line they are
        for number, (line, score) in enumerate(zip(case.transcript, scores, strict=True)):
            if as_number(score) < self.at_least:
                right.pop(line.role, None)
            else:
                right.setdefault(line.role, number)
        winner = min(right, key=right.__getitem__, default=None)
        return {line.role: float(line.role == winner) for line in case.transcript}


def _case(sample: SampleState) -> Case:
    columns = {name: value for name, value in sample.columns.items() if name not in ("role", "transcript")}
    return Case(sample.columns["transcript"], sample.ground_truth, columns)


def _reply(case: Case, line: Line) -> SampleState:
    """Return a line as a whole conversation that the policy wrote."""
    sample = SampleState("", 0, [ChatMessage("assistant", line.text)], case.ground_truth, case.columns)
    sample.init_msg_size = 0
    return sample
