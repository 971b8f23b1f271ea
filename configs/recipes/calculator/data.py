"""Calculations of two steps behind three worked examples, as train.jsonl and test.jsonl.

    python configs/recipes/calculator/data.py DIRECTORY

The worked examples are turns of the conversation: the model sees calls of the calculator, their results and an answer.
Without them it never calls, and with fewer it rarely calls twice. The 128 held-out calculations are never trained on.
"""

import json
import random
import sys
from pathlib import Path

CALCULATIONS = 1200
HELD_OUT, EXAMPLES = 128, 3
SYSTEM = "Use the calculator, one operation per call. Then write: Answer: <number>"
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def calculation(choose):
    """Return a question, the expressions that answer it, and their results."""
    a, b, c = choose.randint(12, 99), choose.randint(12, 99), choose.randint(2, 30)
    first, second = choose.choice("+-*"), choose.choice("+-")
    a, b = (max(a, b), min(a, b)) if first == "-" else (a, b)
    result = OPERATIONS[first](a, b)
    second = "+" if result < c else second
    word = {"+": "plus", "-": "minus"}[second]
    question = f"What is {a} {first} {b}? And the result {word} {c}?"
    return (
        question,
        [f"{a} {first} {b}", f"{result} {second} {c}"],
        [result, OPERATIONS[second](result, c)],
    )


def worked(question, expressions, results):
    """Return the conversation that answers a question with the calculator."""
    turns = [{"role": "user", "content": question}]
    for expression, result in zip(expressions, results, strict=True):
        call = {"name": "calculator", "arguments": {"expression": expression}}
        turns.append({"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"})
        turns.append({"role": "tool", "content": str(result)})
    return [*turns, {"role": "assistant", "content": f"Answer: {results[-1]}"}]


def rows():
    """Return distinct calculations in a fixed random order, each behind the same worked examples."""
    choose = random.Random(0)
    found = {}
    while len(found) < CALCULATIONS:
        question, expressions, results = calculation(choose)
        found.setdefault(question, (question, expressions, results))
    examples, others = list(found.values())[:EXAMPLES], list(found.values())[EXAMPLES:]
    before = [{"role": "system", "content": SYSTEM}]
    before += [turn for example in examples for turn in worked(*example)]
    return [
        {"messages": [*before, {"role": "user", "content": question}], "ground_truth": str(results[-1])}
        for question, _, results in others
    ]


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    problems = rows()
    for name, part in {"test": problems[:HELD_OUT], "train": problems[HELD_OUT:]}.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
