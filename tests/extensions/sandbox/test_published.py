"""Rows of published sets are read by what they say, and their programs are judged as their authors' judges do."""

import json
from importlib.metadata import PackageNotFoundError

import pytest
from published import ADD, PICKLED, ROWS, STDIN, packed

from rl4llm.compose.environments import readable_rows, without_faulty_rows
from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, DataError, SandboxError
from rl4llm.core.types import ChatMessage
from rl4llm.data.load import load_rows
from rl4llm.extensions.sandbox import Calls, Program, Sandbox, Stdin, Suite
from rl4llm.extensions.sandbox.code_reward import CodeReward
from rl4llm.extensions.sandbox.code_tests import program_of, stored_tests, visible_tests
from rl4llm.rewards import RewardFailure
from rl4llm.rewards.wrappers import Scale
from rl4llm.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def sandbox(_bubblewrap):
    """One with the packages that some sets need."""
    made = Sandbox(packages=["numpy", "pytest"])
    yield made
    made.close()


def sample_of(columns, program):
    """An episode about a row that answered with a program."""
    row = dict(columns)
    for name in ("prompt_id", "messages"):
        row.pop(name, None)
    made = SampleState("p", 0, [ChatMessage("user", "Write it.")], row.pop("ground_truth"), row)
    made.messages.append(ChatMessage("assistant", f"```python\n{program}\n```"))
    return made


def outcome_of(sandbox, program, tests, **columns):
    tests = stored_tests(tests, columns)
    return sandbox.run(program_of(program, tests, columns))


def test_programs_of_published_sets_are_judged_right(sandbox):
    reward = CodeReward(sandbox=sandbox)
    samples = []
    for row in ROWS:
        (read,) = load_rows([row.columns], prompt_column=row.prompt_column, answer_column=row.answer_column)
        reward.check_row(read["ground_truth"], read)
        samples += [sample_of(read, row.right), sample_of(read, row.wrong)]
    scores = reward.score_batch(samples)
    found = {f"{row.set}: {row.right}": scores[2 * i : 2 * i + 2] for i, row in enumerate(ROWS)}
    assert {name: pair for name, pair in found.items() if pair != [1.0, 0.0]} == {}
    assert len({row.set for row in ROWS}) >= 12


def test_names_that_judges_import_need_no_import(sandbox):
    program = (
        "def solve(a: List[int], b) -> Optional[int]:\n"
        "    return deque(a)[0] + math.inf * 0 if b else heapq.nlargest(1, a)"
    )
    tests = {"fn_name": "solve", "inputs": [[[5], False], [[7, 1], False]], "outputs": [[5], [7]]}
    assert outcome_of(sandbox, program, tests).status == "ok"
    assert outcome_of(sandbox, "def f(x): return math.floor(x)", ["assert f(1.5) == 1"]).status == "wrong"
    deep = "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))"
    assert outcome_of(sandbox, deep, {"inputs": ["20000"], "outputs": ["20000"]}).status == "ok"


def test_wrong_whole_numbers_and_wrapped_lists_are_wrong(sandbox):
    ids = {"fn_name": "f", "inputs": [[1]], "outputs": [10**16 + 1]}
    assert outcome_of(sandbox, "def f(x): return 10**16 + 1", ids).status == "ok"
    assert outcome_of(sandbox, "def f(x): return 10**16", ids).status == "wrong"
    assert outcome_of(sandbox, "def f(x): return 1e16", ids).status == "wrong"
    lists = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}
    assert outcome_of(sandbox, "def f(x): return list(range(1, x + 1))", lists).status == "ok"
    first = outcome_of(sandbox, "def f(x): return 1", lists)
    assert [test.status for test in first.tests] == ["wrong", "wrong"]


FUNCTION = {"metadata": {"func_name": "f"}}
UNKNOWN = [  # tests and the columns beside them
    ({"inputs": ["1"], "outputs": ["2"], "checker": "x"}, {}),
    ([{"input": "1", "output": "2", "points": 5}], {}),
    ([{"fn": "f", "args": [1], "expected": 1, "weight": 2}], {}),
    ([{"input": "1", "output": "2", "testtype": "interactive"}], {}),
    ([{"input": "1", "output": "2", "testtype": "functional"}], {}),
    ([{"input": "x", "output": "2", "testtype": "functional"}], FUNCTION),
    ([*STDIN, *ADD], FUNCTION),
    ({"type": "function_call", "inputs": [[1]], "outputs": [1]}, {}),
    ({"type": "stdin", "fn_name": "f", "inputs": ["1"], "outputs": ["1"]}, {}),
    ({"language": "cpp", "test_cases": STDIN}, {}),
    (PICKLED, {}),
    ("def check(candidate):\n    assert candidate(1)", {}),
    ("assert f(1) ==", {}),
    ("print(f(1))", {}),
    ([{"input": {"a": 1}, "output": "2"}], {}),
    *(({"files": {"a.py": "def test_a(): assert 1"}, "required": required}, {})
      for required in (["a.py::test_a", "test_b"], ["a.py::test_a", "b.py::test_b"], "a.py::test_a", [])),
]  # fmt: skip


@pytest.mark.parametrize(("tests", "columns"), UNKNOWN)
def test_tests_without_a_known_meaning_are_refused(tests, columns):
    with pytest.raises(DataError):
        CodeReward(sandbox=Recorded()).check_row(tests, columns)


class Recorded:
    """A runner that is never asked."""

    slots = 1

    def run(self, program, limits=None):
        raise AssertionError(program)

    def close(self):
        pass


def test_layouts_are_read_by_what_the_row_says():
    nulls = {"inputs": ["1"], "outputs": ["2"], "fn_name": None, "type": None, "checker": None}
    assert type(stored_tests(nulls, {})) is Stdin
    functional = stored_tests(packed(ADD), {"metadata": '{"func_name": "add"}'})
    assert type(functional) is Calls
    (case, *_), judge = functional.cases, functional.judge
    assert (case.fn, case.args, judge) == ("add", ([1, 2], 3), "json")
    assert type(stored_tests(packed(STDIN), {"metadata": '{"func_name": "add"}'})) is Stdin
    assert visible_tests(ROWS[0].columns, "") == Stdin((("3\n4\n", "7\n"),))
    helped = {"test_setup_code": "def must_be(f, x):\n    assert f(x) == x"}
    assert stored_tests("must_be(f, 1)", helped).tests == ("must_be(f, 1)",)
    suite = stored_tests(
        "def test_a():\n    x = 1\n    assert f(x) == 1\nclass TestB:\n    def test_c(self): assert g(1)", {}
    )
    assert type(suite) is Suite
    assert suite.required == ("test_solution.py::test_a", "test_solution.py::TestB::test_c")


CHEATS = {
    "equals-everything": "class E:\n    def __eq__(s, o): return True\n    def __hash__(s): return 3\ndef f(x): return E()",
    "is-true": "class E:\n    def __bool__(s): return True\n    def __len__(s): return 3\ndef f(x): return E()",
    "contains-everything": "class E:\n    def __contains__(s, x): return True\n    def __iter__(s): return iter([3])\n"
    "def f(x): return E()",
    "is-near": "class E:\n    def __sub__(s, o): return 0.0\n    __rsub__ = __abs__ = __float__ = __sub__\n"
    "    def __lt__(s, o): return True\n"
    "    __gt__ = __lt__\ndef f(x): return E()",
    "answers-every-method": "class E:\n    def __getattr__(s, n): return lambda *a: True\ndef f(x): return E()",
    "is-a-class": "class f:\n    def __init__(s, x): pass\n    def __eq__(s, o): return True\n"
    "    def __getattr__(s, n): return lambda *a: True",
    "is-a-near-class": "class F:\n    def __init__(s, x): pass\n    def __sub__(s, o): return 0.0\n"
    "    def __eq__(s, o): return True",
    "empties-the-tests": "def f(x):\n    if isinstance(x, list): x.clear(); return []",
    "raises-import-error": "def f(x): raise ModuleNotFoundError(\"No module named 'numpy'\")",
    "is-awaited": "async def f(x): return True",
    "is-named-like-a-literal": "class int:\n    def __eq__(s, o): return True\ndef f(x): return int()",
    "forges-a-handle": "import os, sys\ndef f(x):\n"
    '    os.write(int(sys.argv[2]), b\'{"id":0,"value":{"object":[0,"int"]}}\\n\')\n'
    "    return object()",
}
ASKS = [
    "import math\nassert f(1) == 3", "assert 3 == f(1)", "assert f(1) in (3, 4)", "assert f(1) and f(2)",
     "assert 3 in f(1) and 7 in f(2)",
    "assert abs(f(1) - 3) < 1", "assert 2 < f(1) < 4", "assert math.isclose(f(1), 3)", "assert f('a').startswith('b')",
    "assert abs(F(1) - 3) < 1", "assert F(1) == 3", "assert f('a').isupper()", "assert [f(1)] == [3]",
     "a = [3, 1]\nb = f(a)\nassert b == sorted(a)",
]  # fmt: skip
CASES = "import unittest\nclass TestF(unittest.TestCase):\n    def test_it(self): self.assertEqual(f(1), 3)"


@pytest.mark.parametrize("name", CHEATS)
def test_objects_of_a_program_cannot_pass_its_tests(name, sandbox):
    for tests in (ASKS, CASES):
        outcome = outcome_of(sandbox, CHEATS[name], tests)
        assert outcome.status in ("wrong", "model_error"), outcome
        assert [test.name for test in outcome.tests if test.passed] == []


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("import nopackage\nassert f(1) == 1", {}),
        ("assert f(1) == 1", {"test_setup_code": "import nopackage"}),
        ("x = f(1)\nimport nopackage\nassert x == 1", {}),
        ("def check(candidate):\n    import nopackage\n    assert candidate(1) == 1", {"entry_point": "f"}),
        ("values = [][0]\nassert f(values) == 1", {}),
        ("while True: pass\nassert f(1) == 1", {}),
        ("assert 1 + 1 == len('abc'), f", {}),
        ("def test_it(tmp_path): assert f(1) == 1", {}),
        ("import nopackage\nfrom solution import f\ndef test_it(): assert f(1) == 1", {}),
        ("import unittest\nclass A(unittest.TestCase):\n    def test_it(self):\n        import nopackage\n"
        "        assert f(1) == 1", {}),
    ],
)  # fmt: skip
def test_faults_of_the_tests_mask_the_sample(text, columns, sandbox):
    reward = CodeReward(sandbox=sandbox, wall_s=1.0, total_s=2.0)
    for program in ("def f(x): return x", "def f(x): return 0"):
        (score,) = reward.score_batch([sample_of({"ground_truth": text, **columns}, program)])
        assert isinstance(score, RewardFailure), score


def test_a_row_whose_solution_fails_its_tests_is_named(sandbox):
    reward = CodeReward(sandbox=sandbox)
    row = {"ground_truth": ["assert f(2) == 5"]}
    wrong = "def f(x): return 4"
    bad = [
        {"canonical_solution": "def f(x): return 2 * x"},
        {"solutions": '["def f(x): return 2 * x", "def f(x): return x"]'},
        {"code": "```python\ndef f(x):\n    while True: pass\n```"},
    ]
    good = [
        {"solution": "def f(x): return 2 * x + 1"},
        {"solution": "Two plus two, and one: it is five"},
        {"code": None},
        {},
    ]
    limited = CodeReward(sandbox=sandbox, wall_s=0.5, total_s=0.5)
    for columns in bad:
        (score,) = limited.score_batch([sample_of({**row, **columns}, wrong)])
        assert isinstance(score, RewardFailure)
    assert reward.score_batch([sample_of({**row, **columns}, wrong) for columns in good]) == [0.0] * len(good)
    before = sandbox.counts.total()
    assert reward.score_batch([sample_of({**row, **good[0]}, wrong)] * 2) == [0.0, 0.0]
    assert sandbox.counts.total() == before + 2  # its solution was tried above


def test_changes_to_arguments_reach_the_tests(sandbox):
    nested = "a = [[2, 1], {'k': [1]}, {1}]\nf(a)\nassert a == [[1, 2], {'k': [1, 5]}, {1, 2}, 9]\n"
    program = "def f(a):\n    a[0].sort(); a[1]['k'].append(5); a[2].add(2)\n    {}"
    assert outcome_of(sandbox, program.format("a.append(9)"), nested).status == "ok"
    same_length = nested.replace(", 9]", "]")
    assert outcome_of(sandbox, program.format("return len(a)"), same_length).status == "ok"
    assert outcome_of(sandbox, program.format("a[0].reverse()"), same_length).status == "wrong"


def test_objects_and_dates_of_a_program_can_be_tested(sandbox):
    program = (
        "import datetime, enum\nclass Color(enum.Enum):\n    RED = 1\nclass V:\n    def __init__(s, x): s.x = x\n"
        "    def __add__(s, o): return V(s.x + o.x)\n    def __eq__(s, o): return s.x == o.x\n"
        "    def __lt__(s, o): return s.x < o.x\n"
        "    def __len__(s): return s.x\n    def __iter__(s): return iter(range(s.x))\n"
        "    def __getitem__(s, i): return s.x * i\n"
        "    @classmethod\n    def zero(cls): return cls(0)\n"
        "def tomorrow(d): return d + datetime.timedelta(1)\ndef color(): return Color.RED\ndef make(x): return V(x)"
    )
    tests = [
        "import datetime\nassert tomorrow(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
        "assert color() == Color.RED and Color.RED.value == 1",
        "assert V(1) + V(2) == V(3) and V(1) < V(2) and not V(1) == V(2)",
        "v = V(3)\nv.x = 2\nassert len(v) == 2 and list(v) == [0, 1] and v[5] == 10 and not V.zero()",
        "assert make(4).x == 4",
    ]
    assert outcome_of(sandbox, program, tests).status == "ok"
    assert outcome_of(sandbox, program.replace("s.x + o.x", "s.x"), tests).status == "wrong"


def test_packages_are_read_only_and_alone(sandbox):
    source = (
        "import os, sys, numpy\nprint(numpy.eye(2).sum(), sorted(os.listdir('/packages')))\n"
        "print([path for path in sys.path if 'packages' in path], os.path.exists({site!r}))\n"
        "try: open('/packages/numpy/mine.py', 'w')\nexcept OSError as error: print(error.strerror)\n"
    )
    import numpy

    site = numpy.__file__.rpartition("/numpy/")[0]
    lines = sandbox.run(Program(source.format(site=site))).stdout.splitlines()
    names = lines[0].partition(" ")[2]
    assert lines[0].startswith("2.0 ")
    assert "'numpy'" in names
    assert "'pytest'" in names
    assert "torch" not in names
    assert lines[1:] == ["['/packages'] False", "Read-only file system"]
    assert sandbox.active.holds


@pytest.mark.parametrize("name", ["nopackage", "/no/directory", "mine"])
def test_packages_that_cannot_be_mounted_are_refused(name, tmp_path, monkeypatch):
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\nRequires-Dist: needed\n")
    (info / "RECORD").write_text("mine.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((ConfigError, PackageNotFoundError)):
        Sandbox(packages=[name])


def test_packages_that_programs_cannot_import_are_refused(_bubblewrap, monkeypatch):
    broken = Sandbox(slots=1, packages=["numpy"])
    monkeypatch.setattr(broken, "_modules", ("nomodule",))
    with pytest.raises(SandboxError):
        broken.probe()
    broken.close()


def test_rows_with_failing_solutions_are_left_out(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LLM_CACHE", str(tmp_path / "cache"))
    right, wrong = "def f(x): return 2 * x", "def f(x): return x"
    codes = [right, wrong, None, "A text.", right, "[no_json for x in y]", f"[{json.dumps(right)}]"]
    rows = load_rows(
        [
            {"prompt": f"Double {i}.", "ground_truth": ["assert f(2) == 4"], "code": code}
            for i, code in enumerate(codes)
        ]
    )
    kept, (warning,) = without_faulty_rows(rows, [CodeReward(sandbox=sandbox)], "data", Ranks())
    assert [row["code"] for row in kept] == [right, *codes[2:]]
    assert rows[1]["prompt_id"] in warning
    before = sandbox.counts.total()
    assert without_faulty_rows(rows, [CodeReward(sandbox=sandbox)], "data", Ranks()) == (kept, [warning])
    assert sandbox.counts.total() == before  # what was found is in the cache
    untried = CodeReward(sandbox=sandbox, try_solutions=False)
    assert without_faulty_rows(rows, [untried], "data", Ranks()) == (rows, [])
    with pytest.raises(DataError):
        without_faulty_rows(rows[1:2], [CodeReward(sandbox=sandbox)], "data", Ranks())


def test_a_row_that_cannot_be_read_is_refused_with_its_place():
    tests = ("assert f(1)", {"inputs": [], "x": 1})
    rows = load_rows([{"prompt": "a", "ground_truth": test} for test in tests])
    wrapped = Scale(CodeReward(sandbox=Recorded()), 2.0)
    with pytest.raises(DataError, match=r"dataset\[1\]"):
        readable_rows(rows, [wrapped], skip=False)
