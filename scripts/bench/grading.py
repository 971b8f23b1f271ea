"""How right and how safe the grading of mathematics is.

    python scripts/bench/grading.py --math FILE
    python scripts/bench/grading.py --hostile N [--load PROCESSES]

FILE holds the answers of MATH's training problems, one JSON object with `ground_truth` in each line (.jsonl or .jsonl.gz). A
thousand of them are graded in each form of a reply: how many are right, and which wrong answers made from them are paid:
another sign, digit or unit, half of a list, a number of a formula, the answer inside a power, a pair, an equation or a list.

With --hostile, N hostile replies of all families are graded one at a time, beside PROCESSES that keep a processor busy: how
many scored 0.0, how many were left out, how many took more than 2.5 s, and the slowest.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer import parser_of

from rl4llm.core.base_env import ChatMessage
from rl4llm.core.base_reward import as_sample
from rl4llm.rewards import MathReward

HOSTILE = runpy.run_path(str(Path(__file__).parents[2] / "tests" / "rewards" / "bombs.py"))["hostile"]
TOO_SLOW_S = 2.5
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


def main() -> int:
    """Run one of them; return 1 if a hostile reply scored or took too long."""
    parser = parser_of(__doc__)
    parser.add_argument("--math", type=Path, help="MATH's training problems, .jsonl or .jsonl.gz")
    parser.add_argument("--hostile", type=int, help="number of hostile replies to grade")
    parser.add_argument("--load", type=int, default=0, help="processes that keep a processor busy meanwhile")
    options = parser.parse_args()
    if options.hostile:
        with busy(options.load):
            return 0 if throw_hostile(options.hostile) else 1
    if not options.math:
        parser.error("--math or --hostile is missing.")
    reward = MathReward()
    reward.pool.warm_up()
    grade_forms(reward, read_answers(options.math)[:1000])
    reward.close()
    return 0


def read_answers(path: Path) -> list[str]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        answers = [json.loads(line)["ground_truth"] for line in file]
    given = [answer for answer in answers if answer.strip()]
    random.Random(0).shuffle(given)
    return given


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
    for reply, gold in HOSTILE(count):
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


if __name__ == "__main__":
    sys.exit(main())
