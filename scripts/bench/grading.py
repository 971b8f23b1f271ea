"""How right the grading of mathematics is.

    python scripts/bench/grading.py FILE

FILE holds the answers of MATH's training problems, one JSON object with `ground_truth` in each line (.jsonl or .jsonl.gz). A
thousand of them are graded in each form of a reply: how many are right, and which wrong answers made from them are paid:
another sign, digit or unit, half of a list, a number of a formula, the answer inside a power, a pair, an equation or a list.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer import parser_of

from rl4llm.core.base_env import ChatMessage
from rl4llm.core.base_reward import as_sample
from rl4llm.rewards import MathReward

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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="MATH's training problems, .jsonl or .jsonl.gz")
    answers = read_answers(parser.parse_args().file)
    reward = MathReward()
    reward.pool.warm_up()
    grade_forms(reward, answers[:1000])
    reward.close()


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


if __name__ == "__main__":
    main()
