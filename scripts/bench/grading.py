"""How right the grading of mathematics is.

    python scripts/bench/grading.py FILE

FILE holds the answers of MATH's training problems, one JSON object with `ground_truth` in each line (.jsonl or .jsonl.gz). A
thousand of them are graded in each form of a reply: how many are right, and which wrong answers made from them are paid:
another sign, digit or unit, half of a list, a number of a formula, the answer inside a power, a pair, an equation or a list.
"""
# ruff: noqa: RUF001

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
    "final": "We add.\n<final>%s</final>",
    "begin_of_box": "So it is <|begin_of_box|>%s<|end_of_box|>.",
    "brackets": "We add. [ANSWER] %s [/ANSWER]",
    "label in a box": "$\\boxed{\\text{Answer: } %s}$",
    "box, end of turn": "So $\\boxed{%s}$<|im_end|>",
    "two boxes": "\\boxed{%s} and so \\boxed{%s}",
    "hash": "We add.\n#### %s",
    "json": 'Here:\n```json\n{"reasoning": "1 + 1", "answer": "%s"}\n```',
    "minerva": "Final Answer: The final answer is $%s$. I hope it is correct.",
    "more behind it": "The answer is $%s$. We used the formula of Euler with 3 terms.",
    "next line": "Therefore the correct answer is:\n\n$%s$",
    "restated": "How many are there? The answer is $%s$.\n\n**Answer:** \\(%s\\)",
    "html": "<p>We add.</p><p>The answer is <b>%s</b></p>",
    "Chinese": "我们相加。因此，答案是 $%s$。",
    "Chinese label": "我们相加。\n\n**答案：**$%s$",
    "Russian": "Сложим.\nОтвет: $%s$.",
    "French": "On ajoute. La réponse est $%s$.",
    "Swahili": "Jibu: %s",
    "heading": "We add.\n\n### Final Answer\n\n$$%s$$",
    "display": "Hence\n\\[\n%s\n\\]",
    "align": "Therefore\n\\begin{align*}\nV &= a + b \\\\\n&= %s\n\\end{align*}",
    "dots": "Hence $S = 1 + 1 + \\cdots = %s$.",
    "table": "| step | value |\n|---|---|\n| sum | $1$ |\n| answer | $%s$ |",
    "code": "So:\n```\n%s\n```",
    "wish": "So we get $%s$. I hope this helps!",
    "end of a proof": "Hence we get $%s$ $\\blacksquare$",
    "quotation": "So:\n\n> **%s**",
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
        right = sum(grade_replies(reward, [(fill(form, answer), answer) for answer in answers]))
        chain = "= %s" in form  # where "2x + y = 3" says 3
        tried = [pair for pair in wrong if not (chain and "=" in pair[1])]
        scores = grade_replies(reward, [(fill(form, answer), gold) for gold, answer in tried])
        paid = [pair for pair, score in zip(tried, scores, strict=True) if score == 1.0]
        print(
            f"as {name}: {right:.0f} of {len(answers)} right; {len(paid)} of {len(tried)} wrong ones paid: {paid}"
        )


def fill(form: str, answer: str) -> str:
    return form.replace("%s", json.dumps(answer)[1:-1] if "json" in form else answer)


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
