"""Small functions to write, with asserts that test them, as train.jsonl and test.jsonl.

    python configs/recipes/code/data.py DIRECTORY

"Write a Python function `f(n)` that returns n times 3 minus 1." The numbers of the held-out problems occur in no problem of
the training set.
"""

import json
import random
import sys
from pathlib import Path

ASK = "Write a Python function `{signature}` that returns {what}. Answer with one ```python block, and nothing else."
SHAPES = {  # a function's parameter: the kinds of values that it is tested with
    "n": (3, 0, 12, -5),
    "text": ("hello", "abcdef", "a cat sat"),
    "items": ([3, 1, 2], [5, 9, 4, 4], [10, 20, -3]),
}
PROBLEMS = {  # what it returns, and the expression that computes it; k is a number
    "n": {
        "n plus {k}": "n + k",
        "n times {k}": "n * k",
        "{k} minus n": "k - n",
        "the square of n, plus {k}": "n * n + k",
        "n times {k} minus 1": "n * k - 1",
        "the remainder of n divided by {k}": "n % k",
        "True if n is greater than {k}, otherwise False": "n > k",
        "the larger one of n and {k}": "max(n, k)",
    },
    "text": {
        "the text repeated {k} times": "text * k",
        "the first {k} characters of the text": "text[:k]",
        "the text without its first {k} characters": "text[k:]",
        "the text in capital letters, {k} times in a row": "text.upper() * k",
        "True if the text has more than {k} characters, otherwise False": "len(text) > k",
        "the length of the text plus {k}": "len(text) + k",
    },
    "items": {
        "the sum of the items plus {k}": "sum(items) + k",
        "the largest item plus {k}": "max(items) + k",
        "a list of all items that are greater than {k}": "[item for item in items if item > k]",
        "a list of the items, each plus {k}": "[item + k for item in items]",
        "a list of the items, each times {k}": "[item * k for item in items]",
        "True if {k} is among the items, otherwise False": "k in items",
        "the number of items greater than {k}": "len([item for item in items if item > k])",
    },
}
NUMBERS, HELD_OUT_NUMBERS = (2, 3, 4, 6, 7, 9, 10, 12), (5, 8, 11)


def rows(numbers):
    """Return a problem for each thing to compute and each number, in a fixed random order."""
    found = []
    for parameter, problems in PROBLEMS.items():
        for what, expression in problems.items():
            for k in numbers:
                compute = eval(f"lambda {parameter}: {expression}", {"k": k})
                tests = [f"assert f({value!r}) == {compute(value)!r}" for value in SHAPES[parameter]]
                question = ASK.format(signature=f"f({parameter})", what=what.format(k=k))
                found.append({"question": question, "answer": "\n".join(tests), "entry_point": "f"})
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in {"test": rows(HELD_OUT_NUMBERS), "train": rows(NUMBERS)}.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
