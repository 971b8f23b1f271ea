"""How right, how safe and how fast the grading of mathematics is: counts, and seconds on this machine.

    python scripts/bench/grading.py [--math FILE] [--answers N]
    python scripts/bench/grading.py --hostile N [--load PROCESSES]

FILE holds the answers of MATH's training problems, one JSON object with `ground_truth` in each line (.jsonl or .jsonl.gz);
without it the two suites of answers are left out. Three suites and two figures:

- each answer, in a box, against itself, and with other markup that means the same: how many are right;
- each answer against that of another problem: how many are right, and of these, how many are not the same text;
- a thousand answers in each form of a reply: how many are right, and which wrong answers made from them are paid: another
  sign, digit or unit, half of a list, a number of a formula, the answer inside a power, a pair, an equation or a list;
- 60 answers made to hang or crash a grader, in the main thread, in another thread and in an event loop: how many are not
  exactly 0.0, and how long the slowest took;
- 128 answers, a fifth of them such bombs: seconds, with 2 workers;
- honest answers alone and right after a bomb that takes its whole time limit, by turns: seconds of one, median and worst.

With --hostile only this: N hostile replies of all families, one at a time, beside PROCESSES that keep a processor busy: how
many scored 0.0, how many were left out, how many took more than 2.5 s, and the slowest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import re
import runpy
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from peer import parser_of

from rl4llm.core.base_env import ChatMessage
from rl4llm.core.base_reward import as_sample
from rl4llm.rewards import MathReward

BOMBS_FILE = runpy.run_path(str(Path(__file__).parents[2] / "tests" / "rewards" / "bombs.py"))
BOMBS = BOMBS_FILE["BOMBS"]
TOO_SLOW_S = 2.5
GOLD = "2\\sqrt{3}"
FORMS = {
    "boxed": "So it is $\\boxed{%s}$.",
    "tag": "<think>a</think>\n<answer>%s</answer>",
    "tag and $": "<answer>$%s$</answer>",
    "formula": "Therefore we get $%s$.",
    "announced": "Final Answer: %s",
    "sentence": "We add them up.\nSo the result is %s.",
    "bold": "It follows.\n\n**%s**",
    "plain": "%s",
}
UNITS = (("hours", "minutes"), ("cm", "m"), ("inches", "feet"), ("square", "cubic"), ("^2", "^3"))
OTHER_MARKUP = (("\\frac{", "\\dfrac{"), ("(", "\\left("), (")", "\\right)"), (",", ", "), ("+", " + "))


def main() -> int:
    """Run everything; return 1 if a bomb was not graded 0 or the graders did not survive it."""
    parser = parser_of(__doc__)
    parser.add_argument("--math", type=Path, help="MATH's training problems, .jsonl or .jsonl.gz")
    parser.add_argument("--answers", type=int, help="how many of them, drawn with seed 0; all by default")
    parser.add_argument("--hostile", type=int, help="number of hostile replies to grade; nothing else is run")
    parser.add_argument("--load", type=int, default=0, help="processes that keep a processor busy meanwhile")
    options = parser.parse_args()
    if options.hostile:
        with busy(options.load):
            return 0 if throw_hostile(options.hostile) else 1
    reward = MathReward()
    reward.pool.warm_up()
    if options.math:
        answers = read_answers(options.math, options.answers)
        grade_answers(reward, answers)
        grade_forms(reward, answers[:1000])
    places = {"main thread": run_here, "a thread": run_in_thread, "an event loop": run_in_loop}
    harmless = [throw_bombs(reward, place, run) for place, run in places.items()]
    reward.close()
    time_batch()
    time_stream()
    return 0 if all(harmless) else 1


def read_answers(path: Path, count: int | None) -> list[str]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        answers = [json.loads(line)["ground_truth"] for line in file]
    given = [answer for answer in answers if answer.strip()]
    print(f"{path.name}: {len(answers)} problems, {len(answers) - len(given)} of them without an answer")
    random.Random(0).shuffle(given)
    return given[:count]


def grade(reward: MathReward, answers: Sequence[str], golds: Sequence[str]) -> list[float]:
    said = [[ChatMessage("assistant", f"So it is \\boxed{{{answer}}}.")] for answer in answers]
    return reward.score_batch([as_sample(one, gold, {}) for one, gold in zip(said, golds, strict=True)])


def grade_answers(reward: MathReward, answers: Sequence[str]) -> None:
    start = time.perf_counter()
    own = sum(grade(reward, answers, answers))
    print(f"against themselves: {own:.0f} of {len(answers)} right ({own / len(answers):.2%})")
    other = [rewritten(answer) for answer in answers]
    changed = [(new, old) for new, old in zip(other, answers, strict=True) if new != old]
    right = sum(grade(reward, [new for new, _ in changed], [old for _, old in changed]))
    print(f"with other markup: {right:.0f} of {len(changed)} right ({right / max(len(changed), 1):.2%})")
    golds = [*answers[1:], answers[0]]
    pairs = [
        (a, g)
        for a, g, score in zip(answers, golds, grade(reward, answers, golds), strict=True)
        if score == 1.0
    ]
    texts = [(answer, gold) for answer, gold in pairs if answer != gold]
    print(
        f"against another problem's: {len(pairs)} of {len(answers)} right, {len(pairs) - len(texts)} of the same text"
    )
    print(f"  right with another text: {len(texts)} ({len(texts) / len(answers):.2%}): {texts}")
    print(f"  {time.perf_counter() - start:.0f} s in all; {dict(reward.pool.counts)}")


def grade_forms(reward: MathReward, answers: Sequence[str]) -> None:
    rng = random.Random(0)
    wrong = [(gold, answer) for gold in answers for answer in made_wrong(gold, rng)]
    for name, form in FORMS.items():
        right = sum(grade_replies(reward, [(form % answer, answer) for answer in answers]))
        scores = grade_replies(reward, [(form % answer, gold) for gold, answer in wrong])
        paid = [pair for pair, score in zip(wrong, scores, strict=True) if score == 1.0]
        print(
            f"as {name}: {right:.0f} of {len(answers)} right; {len(paid)} of {len(wrong)} wrong ones paid: {paid}"
        )


def grade_replies(reward: MathReward, pairs: Sequence[tuple[str, str]]) -> list[float]:
    return reward.score_batch(
        [as_sample([ChatMessage("assistant", reply)], gold, {}) for reply, gold in pairs]
    )


def made_wrong(gold: str, rng: random.Random) -> Iterator[str]:
    """Make answers that look like the right one."""
    digits = [place for place, char in enumerate(gold) if char.isdigit()]
    if digits and (numbers := re.findall(r"\d+", gold)):
        place = rng.choice(digits)
        yield f"{gold[:place]}{(int(gold[place]) + rng.randint(1, 8)) % 10}{gold[place + 1 :]}"
        if re.search(r"[\\^/()]", gold) and not re.search(r"circ|%|text|\$|frac", gold):
            yield numbers[-1]
    if re.fullmatch(r"-?[1-9][\d.]*", gold):
        yield gold[1:] if gold[0] == "-" else f"-{gold}"
        yield from (
            f"2^{{{gold}}}",
            f"a_{{{gold}}}",
            f"(3, {gold})",
            f"2x + y = {gold}",
            f"x \\geq {gold}",
            f"7777, {gold}",
        )
    if "," in gold and not re.search(r"[(\[\\]|\d,\d{3}", gold):
        yield gold.rpartition(",")[2]
    yield from (gold.replace(*units) for units in UNITS if "\\text" in gold and units[0] in gold)


def rewritten(answer: str) -> str:
    for old, new in OTHER_MARKUP:
        if "\\text" not in answer and "\\left" not in answer and "\\dfrac" not in answer:
            answer = answer.replace(old, new)
    return answer


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep a processor busy with each of some processes."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def throw_hostile(count: int) -> bool:
    """Grade hostile replies one at a time; False when one scored or took too long."""
    reward = MathReward()
    reward.pool.warm_up()
    before = os.getloadavg()
    grades = []
    for reply, gold in BOMBS_FILE["hostile"](count):
        sample = as_sample([ChatMessage("assistant", reply)], gold, {})
        start = time.perf_counter()
        (score,) = reward.score_batch([sample])
        grades.append((time.perf_counter() - start, score, reply, gold))
    seconds = [each[0] for each in grades]
    zeros = sum(each[1] == 0.0 for each in grades)
    scored = [each for each in grades if each[1] != 0.0 and not isinstance(each[1], Exception)]
    slow = sum(each > TOO_SLOW_S for each in seconds)
    print(
        f"{count} hostile replies: {zeros} scored 0.0, {count - zeros - len(scored)} left out, {len(scored)} scored more"
    )
    print(f"  worst {max(seconds):.2f} s, {slow} above {TOO_SLOW_S} s, {sum(seconds):.0f} s in all")
    print(f"  {dict(reward.pool.counts)}; load averages before {before}, after {os.getloadavg()}")
    for took, score, reply, gold in [*sorted(grades, key=lambda each: -each[0])[:5], *scored]:
        print(f"  {took:.2f} s, {score!r:.100} against {gold}: {reply!r:.150}")
    reward.close()
    return not slow and not scored


def throw_bombs(reward: MathReward, place: str, run: Callable[[Callable[[], float]], float]) -> bool:
    seconds, wrong = [], 0
    for bomb in BOMBS:
        start = time.perf_counter()
        wrong += run(lambda bomb=bomb: grade(reward, [bomb], [GOLD])[0]) != 0.0
        seconds.append(time.perf_counter() - start)
    alive = run(lambda: grade(reward, ["\\sqrt{12}"], [GOLD])[0]) == 1.0
    print(
        f"bombs in {place}: {wrong} of {len(BOMBS)} not 0.0, the slowest {max(seconds):.2f} s; grades on: {alive}"
    )
    return alive and not wrong


def run_here(work: Callable[[], float]) -> float:
    return work()


def run_in_thread(work: Callable[[], float]) -> float:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def run_in_loop(work: Callable[[], float]) -> float:
    async def inside() -> float:
        return work()

    return asyncio.run(inside())


def time_batch() -> None:
    """128 answers that differ, so that nothing is asked once for several; the workers have still to start."""
    rng = random.Random(0)
    bombs = BOMBS[:26]
    golds = {
        f"x^{{{rng.randint(2, 9)}}} + {n}": f"{n} + x^{{{rng.randint(2, 9)}}}"
        for n in range(128 - len(bombs))
    }
    answers = [*bombs, *golds]
    rng.shuffle(answers)
    reward = MathReward()
    start = time.perf_counter()
    scores = grade(reward, answers, [golds.get(answer, GOLD) for answer in answers])
    seconds = time.perf_counter() - start
    right = sum(score == is_right(answer, golds) for score, answer in zip(scores, answers, strict=True))
    print(
        f"128 answers, {len(bombs)} of them bombs: {seconds:.1f} s, {right} graded right; {dict(reward.pool.counts)}"
    )
    reward.close()


def time_stream(rounds: int = 16) -> None:
    """Time single answers, so that no answer waits for a bomb of its batch. They differ, since time-outs are remembered."""
    reward = MathReward()
    reward.pool.warm_up()
    seconds: dict[str, list[float]] = {"alone": [], "after a bomb": [], "bombs": []}
    for number in range(rounds):
        for place in ("alone", "after a bomb"):
            if place == "after a bomb":
                start = time.perf_counter()
                grade(reward, [f"\\sqrt{{2^{{9999}}+{2 * number + 1}}}"], [GOLD])
                seconds["bombs"].append(time.perf_counter() - start)
            honest = f"x^2 + {2 * number + len(place)} x"
            start = time.perf_counter()
            grade(reward, [honest], [f"x(x + {2 * number + len(place)})"])
            seconds[place].append(time.perf_counter() - start)
    figures = [
        f"{place} {statistics.median(each):.3f} s ({max(each):.3f} s)" for place, each in seconds.items()
    ]
    print(f"{rounds} honest answers, median (worst): {', '.join(figures)}; {dict(reward.pool.counts)}")
    reward.close()


def is_right(answer: str, golds: dict[str, str]) -> bool:
    return answer in golds and set(answer.split(" + ")) == set(golds[answer].split(" + "))


if __name__ == "__main__":
    sys.exit(main())
