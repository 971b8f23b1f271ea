"""Scores of a model on a set of problems with their intervals, and comparisons of two models on the same problems.

Samples of one problem are not independent. Therefore means are over one value for each problem, and intervals
describe other problems of the same kind (Miller 2024, "Adding Error Bars to Evals", clusters of section 2.2).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rl4llm.core.base_env import SampleState
from rl4llm.core.base_reward import final_reply
from rl4llm.core.types import Group, Trajectory

Z = statistics.NormalDist().inv_cdf(0.975)
SHARES = "95 %, over problems: Wilson's for shares, Student's with Agresti and Min's addition for their differences"
INTERVALS = f"{SHARES}, as for rewards of 0 and 1; Student's for others, in 0 to 1 or -1 to 1 if they are"
RANGES = ((0.0, 1.0), (-1.0, 1.0))  # of most rewards; an interval stays in the first that has all of them


@dataclass(frozen=True, slots=True)
class Problem:
    """A held-out prompt and the rewards of its samples; each role of several is a separate problem.

    `failed` samples are not among the `rewards`: they failed through no fault of the model. `successes` is None if no reward
    defines success. `question` is the last message of the prompt, and `answers` are the last messages of the samples.
    """

    prompt_id: str
    rewards: tuple[float, ...]
    successes: int | None
    failed: int = 0
    role: str = ""
    part: str = ""
    question: str = ""
    answers: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True)
class Score:
    """The mean over `problems`, with the ends of its interval, None for a single problem without a known spread."""

    value: float
    low: float | None
    high: float | None
    problems: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The baseline's score on the common problems, and the mean of what each problem `gained` over it."""

    baseline: float
    gained: Score


def problems_of(groups: Sequence[Group], failed: Sequence[SampleState]) -> list[Problem]:
    """Return all problems, including those whose samples all failed, without frozen roles."""
    lost: dict[tuple[str, str, str], int] = defaultdict(int)
    for sample in failed:
        lost[sample.prompt_id, sample.role, sample.special.part] += 1
    problems = [_problem(group, lost) for group in groups if not group.frozen]
    return problems + [
        Problem(name, (), None, count, role, part) for (name, role, part), count in lost.items()
    ]


def graded_by(reward: str, groups: Sequence[Group]) -> list[Problem]:
    """Return the problems as another reward of the same episodes grades them, without texts."""
    return [
        Problem(
            group.prompt_id,
            tuple(member.rewards[reward] for member in group.trajectories),
            _successes([member.successes.get(reward) for member in group.trajectories]),
        )
        for group in groups
    ]


def scores(problems: Sequence[Problem], ks: Sequence[int]) -> dict[str, Score]:
    """Return pass@k for each of `ks`, mean@n of n samples, and the mean reward; again for each part of a run of several.

    Only the mean reward is there if no reward defines success. A problem with fewer than k samples left does not count in
    pass@k.
    """
    parts = {part: members for part, members in _by_part(problems).items() if part}
    return _scores(problems, ks) | {
        f"part/{part}/{name}": score
        for part, members in parts.items()
        for name, score in _scores(members, ks).items()
    }


def scores_by_part(problems: Sequence[Problem], ks: Sequence[int]) -> dict[str, Score]:
    """Return pass@k for each of `ks`, separately for each part."""
    return {
        f"{part}/{name}": score
        for part, members in _by_part(problems).items()
        for name, score in _scores(members, ks).items()
        if name.startswith("pass@")
    }


def differences_by_part(
    problems: Sequence[Problem], baseline: Sequence[Problem], ks: Sequence[int]
) -> dict[str, Difference]:
    """Return how much better pass@k is than the baseline's, separately for each part that both have."""
    before = _by_part(baseline)
    return {
        f"{part}/{name}": difference
        for part, members in _by_part(problems).items()
        for name, difference in differences(members, before.get(part, []), ks).items()
        if name.startswith("pass@")
    }


def differences(
    problems: Sequence[Problem], baseline: Sequence[Problem], ks: Sequence[int]
) -> dict[str, Difference]:
    """Return how much better each score is than the baseline's, on the common problems."""
    gained, pooled = {}, (*problems, *baseline)
    for name, measure in _measures(problems, ks).items():
        new, old = _by_prompt(measure, problems), _by_prompt(measure, baseline)
        if both := [prompt for prompt in new if prompt in old]:
            gains = [new[prompt] - old[prompt] for prompt in both]
            fewest = min(item.samples for item in pooled if measure(item) is not None)
            attempts = int(name.removeprefix("pass@")) if name.startswith("pass@") else 1
            draws = fewest / attempts
            score = _of_rewards(gains, pooled, draws) if name == "reward" else difference_score(gains, draws)
            gained[name] = Difference(statistics.fmean(old[prompt] for prompt in both), score)
    return gained


def other_questions(problems: Sequence[Problem], baseline: Sequence[Problem]) -> int:
    """Return how many problems have the id of one of the baseline but not its question.

    Problems of roles are left out: what a role answers first may be a model's text.
    """
    before = {(problem.part, problem.prompt_id): problem.question for problem in baseline}
    return sum(
        before.get((problem.part, problem.prompt_id), "") not in ("", problem.question)
        for problem in problems
        if not problem.role
    )


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the probability that one of k attempts succeeds, estimated without bias (Chen et al. 2021, equation 1).

    >>> pass_at_k(samples=4, successes=1, k=2)
    0.5
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def share_score(values: Sequence[float]) -> Score:
    """Return the mean of shares, with Wilson's interval for as many draws as have the measured spread.

    With one sample each this is Wilson's own interval of a proportion; it does not shrink to nothing where all succeed.
    Where problems agree more than single draws would, they count as more draws (Korn and Graubard 1998).
    """
    mean, count = statistics.fmean(values), len(values)
    spread = statistics.pvariance(values, mean)
    draws = count * mean * (1 - mean) / spread if spread > 1e-12 else count
    middle = (mean + Z**2 / (2 * draws)) / (1 + Z**2 / draws)
    half = Z * math.sqrt(mean * (1 - mean) / draws + Z**2 / (4 * draws**2)) / (1 + Z**2 / draws)
    return Score(mean, max(0.0, middle - half), min(1.0, middle + half), count)


def mean_score(values: Sequence[float]) -> Score:
    """Return the mean of any numbers, with Student's interval."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Score(mean, None, None, count)
    half = _student(count - 1) * statistics.stdev(values, mean) / math.sqrt(count)
    return Score(mean, mean - half, mean + half, count)


def difference_score(values: Sequence[float], draws: float = 1.0) -> Score:
    """Return the mean of differences of paired shares, each of `draws` attempts, with Student's interval.

    It adds half an attempt that was gained, half one that was lost, and one that stayed, so it does not shrink to nothing
    where no problem changed. With one attempt per problem these are the additions of Agresti and Min (2005, "Wald+2").
    With many it is the interval of a paired t-test: a few problems with many samples show a small gain.
    """
    count, total, squares = len(values), math.fsum(values), math.fsum(value**2 for value in values)
    added = 1 / draws
    number = count + 2 * added
    middle = total / number
    spread = (squares + added - total**2 / number) / (number * (number - 1))
    half = _student(max(count - 1, 1)) * math.sqrt(spread)
    return Score(total / count, max(-1.0, middle - half), min(1.0, middle + half), count)


def _student(freedom: int) -> float:
    """Return the 0.975 quantile of Student's distribution (Abramowitz and Stegun 1964, 26.7.5): 0.7 % low at 3 degrees."""
    if freedom < 3:
        return (12.7062, 4.30265)[freedom - 1]
    z, n = Z, freedom
    higher = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + higher


def _by_part(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    parts: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        parts[problem.part].append(problem)
    return dict(sorted(parts.items()))


Measure = Callable[[Problem], float | None]


def _measures(problems: Iterable[Problem], ks: Sequence[int]) -> dict[str, Measure]:
    """Return what is measured of one problem, by the name of the score. A measure is None for too few samples."""
    most = max((problem.samples for problem in problems), default=0)
    measures: dict[str, Measure] = {f"pass@{k}": partial(_pass, k=k) for k in ks}
    measures[f"mean@{most}"] = partial(_pass, k=1)  # the share of the samples that succeeded
    measures["reward"] = lambda problem: statistics.fmean(problem.rewards) if problem.rewards else None
    return measures


def _scores(problems: Sequence[Problem], ks: Sequence[int]) -> dict[str, Score]:
    values = {
        name: list(_by_prompt(measure, problems).values())
        for name, measure in _measures(problems, ks).items()
    }
    return {
        name: _of_rewards(each, problems) if name == "reward" else share_score(each)
        for name, each in values.items()
        if each
    }


def _of_rewards(values: Sequence[float], problems: Iterable[Problem], draws: float = 0) -> Score:
    """Return the mean of rewards, or of their paired differences if `draws`, with an interval that is possible."""
    rewards = {reward for item in problems for reward in item.rewards}
    if rewards <= {0.0, 1.0}:
        return difference_score(values, draws) if draws else share_score(values)
    score = mean_score(values)
    ranges = [ends for ends in RANGES if ends[0] <= min(rewards) and max(rewards) <= ends[1]]
    if score.low is None or score.high is None or not ranges:
        return score
    low, high = ranges[0]
    low, high = (low - high, high - low) if draws else (low, high)
    return replace(score, low=max(low, score.low), high=min(high, score.high))


def _by_prompt(measure: Measure, problems: Iterable[Problem]) -> Mapping[str, float]:
    """Return a value for each prompt, the mean of its roles."""
    values: dict[str, list[float]] = defaultdict(list)
    for problem in problems:
        if (value := measure(problem)) is not None:
            values[problem.prompt_id].append(value)
    return {name: statistics.fmean(of_roles) for name, of_roles in values.items()}


def _pass(problem: Problem, k: int) -> float | None:
    """Return pass@k of a problem; None for too few samples."""
    if problem.successes is None or problem.samples < k:
        return None
    return pass_at_k(problem.samples, problem.successes, k)


def _successes(decided: Sequence[bool | None]) -> int | None:
    """Return the number of successes; None if no reward defines success."""
    outcomes = [success for success in decided if success is not None]
    return sum(outcomes) if outcomes else None


def _problem(group: Group, lost: dict[tuple[str, str, str], int]) -> Problem:
    """One group; what is lost of it is taken out of `lost`."""
    members = group.trajectories
    role, part = members[0].role, members[0].part
    return Problem(
        prompt_id=group.prompt_id,
        rewards=tuple(member.reward for member in members),
        successes=_successes([member.success for member in members]),
        failed=lost.pop((group.prompt_id, role, part), 0),
        role=role,
        part=part,
        question=_question(members[0]),
        answers=tuple(final_reply(member.messages) for member in members),
    )


def _question(episode: Trajectory) -> str:
    """Return the text of the message that the policy answered first, "" without one."""
    turns = [place for place, message in enumerate(episode.messages) if message.role == "assistant"]
    begin = turns[-episode.num_turns] if len(turns) >= episode.num_turns else 0
    return episode.messages[begin - 1].content if begin else ""
