"""`rl4llm grade`: the answer that counts in each row, its score, and what is wrong with rows that have none."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from rl4llm.cli import main
from rl4llm.extensions.inspect.grade.command import EXTRACTIONS, SEVERAL_BOXED
from rl4llm.rewards.extract import Extraction
from rl4llm.rewards.math import SeveralBoxed

PAGE = (Path(__file__).parents[4] / "docs" / "rewards.md").read_text()
ASKED = {"role": "user", "content": "Is it \\boxed{4}?"}
SAID = {"role": "assistant", "content": "It is 5."}
ROWS = [
    ({"reply": "So \\boxed{18}.", "ground_truth": "9 * 2 = 18\n#### 18"}, 1.0, ["18"], ["18"], None),
    ({"reply": "It is \\boxed{(x+1)^2}.", "ground_truth": ["7", "x^2+2x+1"]}, 1.0, ["(x+1)^2"], ["7", "x^2+2x+1"], None),
    ({"reply": "\\boxed{1} or rather \\boxed{2}", "ground_truth": 1}, 0.0, ["2"], ["1"], None),
    ({"reply": "I do not know.", "ground_truth": "4"}, 0.0, [], ["4"], "no_answer"),
    ({"reply": f"\\boxed{{{'x' * 500}}}", "ground_truth": "4"}, 0.0, None, ["4"], "refused: more than 400 characters"),
    ({"messages": [ASKED, SAID], "ground_truth": "5"}, 1.0, ["5"], ["5"], None),
    ({"messages": json.dumps([ASKED, SAID]), "ground_truth": "5"}, 1.0, ["5"], ["5"], None),
    ({"reply": "\\boxed{4}", "ground_truth": "nan"}, None, [], [], "ground_truth='nan' is not an answer"),
    ({"reply": "\\boxed{4}", "answer": "4"}, None, [], [], "The column 'ground_truth' is missing"),
    ({"reply": None, "ground_truth": "4"}, None, [], [], ""),
    ({"messages": [ASKED], "ground_truth": "4"}, None, [], [], "messages has no message of the assistant"),
    ({"messages": ["4"], "ground_truth": "4"}, None, [], [], ""),
    ([4], None, [], [], ""),
]  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*rows, name="answers.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def graded(capsys):
    """graded(*words): the exit code and the lines of JSON."""

    def run(*words):
        code = main(["grade", "answers.jsonl", "--json", *words])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_each_row_has_its_answer_score_and_reason(graded):
    write(*(row for row, *_ in ROWS))
    code, found = graded()
    assert code == 1  # some rows were not graded
    for number, (line, (_, score, extracted, truth, note)) in enumerate(zip(found, ROWS, strict=True), 1):
        assert line["row"] == f"answers.jsonl:{number}"
        assert (line["score"], line["ground_truth"]) == (score, truth), line
        assert extracted is None or line["extracted"] == extracted, line
        assert (line["note"] or "").startswith(note or "") and (note is None) == (line["note"] is None), line


def test_the_example_of_the_page_prints_what_it_shows(capsys):
    rows, shown = re.search(
        r"<<'END'\n(.*?)END\nrl4llm grade answers\.jsonl\n```\n\n```\n(.*?)```", PAGE, re.DOTALL
    ).groups()
    Path("answers.jsonl").write_text(rows)
    assert main(["grade", "answers.jsonl"]) == 1
    assert capsys.readouterr().out == shown


def test_options_of_the_reward_change_what_counts(graded):
    write({"reply": "It is \\boxed{1}. No, it is \\boxed{2}. The answer is 3.", "ground_truth": "1"})
    several = "several_answers: 2 different boxed answers"
    expected = {
        ("--several-boxed", "first"): (1.0, ["1"], None),
        ("--several-boxed", "all"): (0.0, ["1", "2"], None),
        ("--several-boxed", "none"): (0.0, [], several),
        ("--extract", "answer"): (0.0, ["3"], None),
    }
    for words, said in expected.items():
        code, (line,) = graded(*words)
        assert (code, line["score"], line["extracted"], line["note"]) == (0, *said), words


def test_choices_are_those_of_the_reward():
    assert (*get_args(Extraction),) == EXTRACTIONS and (*get_args(SeveralBoxed),) == SEVERAL_BOXED


def test_columns_may_have_other_names_and_hold_messages(graded):
    said = [ASKED, {"role": "assistant", "content": "\\boxed{4}"}]
    write({"completion": said, "answer": "4", "reply": "5"}, {"completion": "4", "answer": "4"})
    code, lines = graded("--reply-column", "completion", "--answer-column", "answer")
    assert code == 0 and [line["score"] for line in lines] == [1.0, 1.0]


@pytest.mark.parametrize("text", [
    '{"reply": "4", "ground_truth": "4"}\n{"reply": \n', '{"text": "4", "ground_truth": "4"}\n' * 3, "\n",
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused(text, graded):
    Path("answers.jsonl").write_text(text)
    assert graded() == (1, [])


def test_a_row_without_a_working_verifier_is_not_scored(tmp_path, monkeypatch, graded):
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there")
    monkeypatch.setattr("rl4llm.rewards.math._VERIFIER", f"{tmp_path / 'broken.py'}:same_answer")
    write({"reply": "\\boxed{x+1}", "ground_truth": "1+x+0y"}, {"reply": "\\boxed{4}", "ground_truth": "4"})
    code, (failed, right) = graded()
    assert (code, failed["score"], right["score"]) == (1, None, 1.0)
    assert failed["extracted"] == ["x+1"] and "a_module_that_is_not_there" in failed["note"]
