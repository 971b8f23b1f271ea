"""How good a model is at a set of problems, how sure that is, and how two models compare on the same problems.

A problem's attempts are not independent of each other, so what is averaged is one value for each problem, and intervals
tell of other problems of the same kind (Miller 2024, "Adding Error Bars to Evals", clusters of section 2.2).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rl4llm.core.base_env import SampleState
from rl4llm.core.types import Group
from rl4llm.tracking.summary import succeeded

Z = statistics.NormalDist().inv_cdf(0.975)
INTERVALS = "95 %, over problems: Wilson's for shares, normal for rewards and differences"


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt of the held-out set and what the attempts at it earned; a role of several is a problem of its own.

    `failed` attempts are not among the `rewards`: they failed through no fault of the model.
    """

    prompt_id: str
    rewards: tuple[float, ...]
    successes: int
    failed: int = 0
    role: str = ""
    part: str = ""

    @property
    def samples(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True)
class Score:
    """The mean over `problems`, with the ends of its interval; None of a single problem whose spread nobody knows."""

    value: float
    low: float | None
    high: float | None
    problems: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What the baseline reached on the problems that both have, and how much was `gained` over it, problem by problem."""

    baseline: float
    gained: Score


def problems_of(groups: Sequence[Group], failed: Sequence[SampleState]) -> list[Problem]:
    """What was played, by problem, also those of which nothing is left; roles that are frozen are left out."""
    lost: dict[tuple[str, str, str], int] = defaultdict(int)
    for sample in failed:
        lost[sample.prompt_id, sample.role, sample.part] += 1
    problems = [_problem(group, lost) for group in groups if not group.frozen]
    return problems + [Problem(name, (), 0, count, role, part) for (name, role, part), count in lost.items()]


def scores(problems: Sequence[Problem], ks: Sequence[int]) -> dict[str, Score]:
    """pass@k for each of `ks`, mean@n of n samples, and the mean reward; again for each part of a run of several.

    A problem with fewer than k samples left does not count in pass@k.
    """
    found = _scores(problems, ks)
    for part in sorted({problem.part for problem in problems} - {""}):
        own = _scores([problem for problem in problems if problem.part == part], ks)
        found |= {f"part/{part}/{name}": score for name, score in own.items()}
    return found


def differences(problems: Sequence[Problem], baseline: Sequence[Problem], ks: Sequence[int]) -> dict[str, Difference]:
    """How much better each score is than the baseline's, on the problems that both have."""
    found = {}
    for name, measure in _measures(problems, ks).items():
        new, old = _by_prompt(measure, problems), _by_prompt(measure, baseline)
        both = [prompt for prompt in new if prompt in old]
        if both:
            gained = mean_score([new[prompt] - old[prompt] for prompt in both])
            found[name] = Difference(statistics.fmean(old[prompt] for prompt in both), gained)
    return found


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The probability that one of k attempts succeeds, estimated without bias (Chen et al. 2021, equation 1).

    >>> pass_at_k(samples=4, successes=1, k=2)
    0.5
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def share_score(values: Sequence[float]) -> Score:
    """The mean of shares, with Wilson's interval for as many draws as have the spread that was found.

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
    """The mean of any numbers, with the interval of a normal distribution."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Score(mean, None, None, count)
    half = Z * statistics.stdev(values, mean) / math.sqrt(count)
    return Score(mean, mean - half, mean + half, count)


Measure = Callable[[Problem], float | None]


def _measures(problems: Iterable[Problem], ks: Sequence[int]) -> dict[str, Measure]:
    """What is measured of one problem, by the name of the score; None where it has too few samples."""
    most = max((problem.samples for problem in problems), default=0)
    shares: dict[str, Measure] = {f"pass@{k}": partial(_pass, k=k) for k in ks}
    shares[f"mean@{most}"] = lambda problem: problem.successes / problem.samples if problem.samples else None
    return {**shares, "reward": lambda problem: statistics.fmean(problem.rewards) if problem.rewards else None}


def _scores(problems: Sequence[Problem], ks: Sequence[int]) -> dict[str, Score]:
    found = {}
    for name, measure in _measures(problems, ks).items():
        values = list(_by_prompt(measure, problems).values())
        if values:
            found[name] = mean_score(values) if name == "reward" else share_score(values)
    return found


def _by_prompt(measure: Measure, problems: Iterable[Problem]) -> Mapping[str, float]:
    """A value for each prompt: of several roles their mean."""
    values: dict[str, list[float]] = defaultdict(list)
    for problem in problems:
        if (value := measure(problem)) is not None:
            values[problem.prompt_id].append(value)
    return {name: statistics.fmean(of_roles) for name, of_roles in values.items()}


def _pass(problem: Problem, k: int) -> float | None:
    return pass_at_k(problem.samples, problem.successes, k) if problem.samples >= k else None


def _problem(group: Group, lost: dict[tuple[str, str, str], int]) -> Problem:
    """One group; what is lost of it is taken out of `lost`."""
    members = group.trajectories
    role, part = members[0].role, members[0].part
    return Problem(
        prompt_id=group.prompt_id,
        rewards=tuple(member.reward for member in members),
        successes=sum(succeeded(member.rewards) for member in members),
        failed=lost.pop((group.prompt_id, role, part), 0),
        role=role,
        part=part,
    )
