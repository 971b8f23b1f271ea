"""Rows in the schemas of published sets, each with a right and a wrong program; all problems were made up here."""

import base64
import json
import pickle
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row, how `data.` reads it, and two programs."""

    set: str
    columns: dict
    prompt_column: str
    answer_column: str
    right: str
    wrong: str


ROWS = []


def add(name, prompt_column, answer_column, *rows):
    for columns, right, wrong in rows:
        ROWS.append(Row(name, columns, prompt_column, answer_column, right, wrong))


def solution(body, imports=""):
    return f"{imports}class Solution:\n    def solve(self, a, b=0):\n        {body}\n"


def packed(tests):
    return base64.b64encode(zlib.compress(json.dumps(tests).encode())).decode()


PICKLED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([{"input": "1", "output": "1"}])))).decode()

# Programs that read and print
STDIN = [
    {"input": "3\n4\n", "output": "7\n", "testtype": "stdin"},
    {"input": "1\n-1", "output": "0", "testtype": "stdin"},
]
HALVES = [
    {"input": "5\n", "output": "2.5\n", "testtype": "stdin"},
    {"input": "1", "output": "0.5", "testtype": "stdin"},
]
add(
    "LiveCodeBench, stdin", "question_content", "private_test_cases",
    ({"question_content": "Add.", "starter_code": "", "private_test_cases": packed(STDIN), "metadata": "{}",
      "public_test_cases": json.dumps(STDIN[:1])},
     "print(int(input()) + int(input()))", "print(int(input()) * int(input()))"),
    ({"question_content": "Halve.", "starter_code": "", "private_test_cases": json.dumps(HALVES), "metadata": "{}"},
     "for line in sys.stdin: print(f'{int(line) / 2:.3f}')", "print(int(input()) // 2)"),
)  # fmt: skip

# Calls of functions
ADD = [
    {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"},
    {"input": "[]\n3", "output": "[]", "testtype": "functional"},
]
MEAN = [{"input": "[1, 2]", "output": "1.50000", "testtype": "functional"}]
LCB = {"question_content": "Solve.", "metadata": '{"func_name": "solve"}', "starter_code": solution("")}
add(
    "LiveCodeBench, functional", "question_content", "private_test_cases",
    (LCB | {"private_test_cases": packed(ADD)},
     "class Solution:\n    def solve(self, a: List[int], b: int) -> List[int]:\n        return tuple(x + b for x in a)",
     solution("return a + [b]")),
    (LCB | {"private_test_cases": json.dumps(MEAN)},
     solution("return sum(a) / len(a)"), solution("return sum(a) // len(a)")),
)  # fmt: skip
DEEP = [{**case, "metadata": {"func_name": "solve"}} for case in ADD]
add(
    "DeepCoder", "problem", "tests",
    ({"problem": "Add.", "tests": json.dumps(DEEP)}, solution("return [x + b for x in a]"), solution("return a")),
    ({"problem": "Add.", "tests": json.dumps({"inputs": [["3", "4"]], "outputs": [["7"]], "fn_name": None})},
     "print(int(input()) + int(input()))", "print(7.5)"),
)  # fmt: skip
WAYS = {"fn_name": "solve", "inputs": [[[1, 2], 3], [[], 1]], "outputs": [[[4, 5]], [[]]]}
add(
    "APPS", "question", "input_output",
    ({"question": "Add.", "input_output": json.dumps(WAYS), "starter_code": "", "solutions": json.dumps(
        ["def solve(a, b): return [x + b for x in a]"])},
     "def solve(a, b): return [x + b for x in a]", "def solve(a, b): return a"),
    ({"question": "Echo.", "input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["1\n2\n"]}), "starter_code": "",
      "solutions": json.dumps(["for x in input().split(): print(x)"])},
     "print(*input().split(), sep='\\n')", "print(input())"),
)  # fmt: skip
KEYS = {"fn_name": "solve", "inputs": [[{"1": 2}]], "outputs": [[3]]}
add(
    "TACO", "question", "input_output",
    ({"question": "Sum.", "input_output": json.dumps(KEYS), "starter_code": "class Solution: ...", "solutions": "[]"},
     solution("return sum(a) + sum(a.values())"), solution("return sum(a.values())")),
    ({"question": "Count.", "input_output": {"inputs": [["2", "x", "y"]], "outputs": [["x y"]], "fn_name": None}},
     "n = int(input())\nprint(*[input() for _ in range(n)])",
     "n = int(input())\nprint(*[input() for _ in range(n)], sep='')"),
)  # fmt: skip
CALLED = [{"type": "function_call", "fn_name": "solve", "input": [[3, 2, 3], 1], "output": 4}]
add(
    "Eurus, PRIME", "prompt", "reward_model.ground_truth",
    ({"prompt": [{"role": "user", "content": "Max."}], "reward_model": {"ground_truth": json.dumps(CALLED),
     "style": "rule"}},
     "def solve(a, b): return max(a) + b", "def solve(a, b): return b"),
    ({"prompt": [{"role": "user", "content": "Max."}], "reward_model": {"style": "rule", "ground_truth": json.dumps(
        {"type": "function_call", "fn_name": "solve", "inputs": [[[1], 2]], "outputs": [3]})}},
     solution("return a[0] + b"), solution("return a[0]")),
)  # fmt: skip
READS = {
    "language": "python",
    "test_cases": [{"fn_name": None, "input": "2", "output": "4", "type": "stdin_stdout"}],
}
add(
    "SYNTHETIC-1", "prompt", "verification_info",
    ({"prompt": "Double.", "verification_info": json.dumps(READS)}, "print(2 * int(input()))", "print(int(input()))"),
    ({"prompt": "Max.", "verification_info": {"language": "python", "test_cases": CALLED}},
     "def solve(a, b): return max(a) + b", "def solve(a, b): return max(a)"),
)  # fmt: skip

# Tests that are code
HEAD = 'def near(a: float, b: float) -> bool:\n    """Tell whether they are near."""\n'
add(
    "HumanEval", "prompt", "test",
    ({"prompt": HEAD, "entry_point": "near", "canonical_solution": "    return abs(a - b) < 1\n",
      "test": "METADATA = {}\ndef check(candidate):\n    assert candidate(1, 1.5)\n    assert not candidate(1, 3)\n"},
     "    return abs(a - b) < 1\n", "    return True\n"),
    ({"prompt": "Write double.", "test": "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(double)"},
     "def double(x): return 2 * x", "def double(x): return x ** 3"),
)  # fmt: skip
PLUS = """import numpy as np
def assertion(out, exp, atol):
    if atol:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
"""
LOOP = "inputs = [[[1, 2]], [[4]]]\nresults = [1.5, 4.0]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n    "
add(
    "HumanEval+", "prompt", "test",
    ({"prompt": 'def mean(a):\n    """Mean."""\n', "entry_point": "mean",
     "canonical_solution": "    return sum(a) / len(a)",
      "test": PLUS + "def check(candidate):\n    " + LOOP.replace("\n",
       "\n    ") + "    assertion(candidate(*inp), exp, 1e-6)\n"},
     "def mean(a): return sum(a) / len(a) + 1e-9", "def mean(a): return sum(a) // len(a)"),
    ({"prompt": 'def twice(a):\n    """2 a."""\n', "entry_point": "twice", "canonical_solution": "    return [*a, *a]",
      "test": PLUS + "def check(candidate):\n    for inp in [[1], []]:\n        assertion(candidate(inp), inp + inp, 0)\n"},
     "    return 2 * a", "    return a"),
)  # fmt: skip
add(
    "MBPP", "text", "test_list",
    ({"text": "Sum.", "code": "def sum_all(a): return sum(a)", "test_setup_code": "ONE = [1]", "challenge_test_list": [],
      "test_list": ["assert sum_all([1, 2]) == 3", "assert sum_all(ONE) == 1"]},
     "def sum_all(a): return sum(a)", "def sum_all(a): return a[0]"),
    ({"text": "Area.", "test_imports": ["import math"],
     "test_list": ["assert math.isclose(Area(1), math.pi, rel_tol=0.001)"],
      "code": "import math\ndef Area(r): return math.pi * r * r"},
     "def Area(r): return 3.1416 * r ** 2", "def Area(r): return 3 * r ** 2"),
)  # fmt: skip
add(
    "MBPP+", "prompt", "test",
    ({"prompt": "Mean.", "code": "def mean(a): return sum(a) / len(a)", "test_imports": [], "test_list": [],
      "test": PLUS + LOOP + "assertion(mean(*inp), exp, 0)\n"},
     "import numpy as np\ndef mean(a): return np.mean(a)", "def mean(a): return a[0]"),
    ({"prompt": "Common.", "code": "def common(a, b): return tuple(set(a) & set(b))", "test_imports": [], "test_list": [],
      "test": "def assertion(out, exp, atol):\n    exact_match = set(out) == set(exp)\n    assert exact_match\n"
              "assertion(common((1, 2), (2, 3)), (2,), 0)"},
     "def common(a, b): return [x for x in a if x in b]", "def common(a, b): return a"),
)  # fmt: skip
BANK = """import pytest
from decimal import Decimal
from solution import Account, Overdrawn

def test_deposit():
    account = Account("Ann")
    account.deposit(Decimal("1.5"))
    assert account.balance == Decimal("1.5") and str(account) == "Ann: 1.5"
    assert isinstance(account, Account) and account in [account] and account.history == [Decimal("1.5")]

@pytest.mark.parametrize("amount, left", [(1, 2), (3, 0)])
def test_withdraw(amount, left):
    account = Account("Ben", 3)
    assert account.withdraw(amount).balance == left
    with pytest.raises(Overdrawn, match="only"):
        account.withdraw(10)
"""
ACCOUNT = """class Overdrawn(ValueError):
    pass

class Account:
    def __init__(self, owner, balance=0):
        self.owner, self.balance, self.history = owner, balance, []
    def deposit(self, amount):
        self.balance += amount
        self.history.append(amount)
    def withdraw(self, amount):
        if amount > self.balance:
            raise Overdrawn(f"only {self.balance}")
        self.balance -= amount
        return self
    def __str__(self):
        return f"{self.owner}: {self.balance}"
"""
SORTS = (
    "from solution import sort\n\ndef test_sort():\n    a = [3, 1, [2]]\n    del a[2]\n    sort(a)\n"
    "    assert a == [1, 3]\n"
)
add(
    "KodCode", "question", "test",
    ({"question": "Write Account.", "solution": ACCOUNT, "test": BANK}, ACCOUNT, ACCOUNT.replace("-=", "=")),
    ({"question": "Sort in place.", "solution": "def sort(a):\n    a.sort()", "test": SORTS},
     "def sort(a):\n    a[:] = sorted(a)\n    return a", "def sort(a):\n    a = sorted(a)\n    return a"),
)  # fmt: skip
PREAMBLE = (
    "from typing import *\nimport math\ninf = float('inf')\n\ndef pairs(a):\n    return list(zip(a, a[1:]))\n"
)
add(
    "LeetCodeDataset", "query", "test",
    ({"query": "Solve.", "prompt": PREAMBLE, "entry_point": "Solution().solve", "starter_code": solution(""),
      "test": "def check(candidate):\n    assert candidate(a = [3, 1], b = 1) == [1, 3]\n"
      "    assert candidate(a = []) == []\n"},
     solution("return sorted(a)"), solution("return a")),
    ({"query": "Gaps.", "prompt": PREAMBLE, "entry_point": "Solution().solve",
      "test": "def check(candidate):\n    assert candidate([1, 4]) == [3]\n"
      "    assert math.isclose(candidate([0.0, 0.5])[0], .5)\n"},
     "class Solution:\n    def solve(self, a: List[int]):\n        return [y - x for x, y in pairs(a)]",
      solution("return [inf]")),
)  # fmt: skip
