"""The math reward: right answers score 1, wrong ones 0, and no text of a model can hurt or fool the grader."""

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from bombs import BOMBS, hostile

from rl4llm.core.base_env import ChatMessage, SampleState
from rl4llm.core.base_reward import as_sample
from rl4llm.core.errors import ConfigError, DataError, RewardError
from rl4llm.rewards import math as math_module
from rl4llm.rewards.math import MathReward, accepted_answers
from rl4llm.rewards.pool import RewardFailure
from rl4llm.rewards.scoring import check_examples, score


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(timeout_s=2.0)
    yield reward
    reward.close()


def finished(reply, ground_truth, prompt="How many?"):
    messages = [ChatMessage("user", prompt), ChatMessage("assistant", reply)]
    return SampleState("p", 0, messages, ground_truth, init_msg_size=1)


def grade(reward, answer, ground_truth):
    return reward([ChatMessage("assistant", f"So it is \\boxed{{{answer}}}.")], ground_truth)


def here(work):
    return work()


def in_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def in_loop(work):
    async def inside():
        return work()

    return asyncio.run(inside())


@pytest.mark.parametrize("run", [here, in_thread, in_loop])
def test_bombs_score_zero_and_leave_the_grader_alive(reward, run):
    gold = "2\\sqrt{3}"
    scores = run(lambda: reward.score_batch([finished(f"\\boxed{{{bomb}}}", gold) for bomb in BOMBS]))
    assert len(BOMBS) == 60 and scores == [0.0] * 60
    assert run(lambda: grade(reward, "\\sqrt{12}", gold)) == 1.0


def test_hostile_replies_of_many_families_earn_nothing(reward, monkeypatch):
    monkeypatch.setattr(reward.pool, "timeout_s", 0.2)
    drawn = hostile(24)
    assert len(dict(drawn)) == 24
    scores = [
        reward.score_batch([as_sample([ChatMessage("assistant", reply)], gold, {})])[0]
        for reply, gold in drawn
    ]
    assert all(isinstance(score, RewardFailure) or score == 0.0 for score in scores)


def test_a_grader_that_hangs_is_a_zero_with_a_reason_and_a_count(tmp_path, monkeypatch):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\ndef same_answer(gold, answer):\n    time.sleep(600 * ('y' in answer))\n    return True\n"
    )
    monkeypatch.setattr(math_module, "_VERIFIER", f"{slow}:same_answer")
    reward = MathReward(timeout_s=2.0)
    samples = [finished("\\boxed{2y}", "2z"), finished("\\boxed{2x}", "2z")]
    scores = score(samples, [reward])
    assert scores.reward.tolist() == [0.0, 1.0]
    assert samples[0].extras["reward_notes"] == {"math": "timeout: took more than 2 s"}
    assert reward.pool.counts["timeout"] == 1
    reward.close()


def test_a_grader_that_cannot_start_fails_the_sample(tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("import a_module_that_is_not_there")
    monkeypatch.setattr(math_module, "_VERIFIER", f"{broken}:same_answer")
    reward = MathReward()
    samples = [finished("\\boxed{2y}", "2z"), finished("\\boxed{18}", "18")]
    scores = score(samples, [reward])
    assert scores.reward[0].isnan() and scores.reward[1] == 1.0
    assert (
        "could not be computed" in samples[0].failure and "a_module_that_is_not_there" in samples[0].failure
    )
    assert samples[1].failure is None
    with pytest.raises(RewardFailure):
        grade(reward, "2y", "2z")
    with pytest.raises(RewardError):
        check_examples([reward])


def test_the_workers_hold_neither_torch_nor_this_package(reward):
    assert grade(reward, "\\sqrt{12}", "2\\sqrt{3}") == 1.0
    server = reward.pool._server.process.pid
    for process in (psutil.Process(server), *psutil.Process(server).children()):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps and "numpy" not in maps


def test_190_answers_of_all_kinds_are_judged_right():
    """In matters of choice, 25 % equals 0.25 and also 25; the pair (1, 2) counts as the set of both."""
    graded = [
        json.loads(line) for line in Path(__file__).with_name("graded.jsonl").read_text("utf-8").splitlines()
    ]
    reward = MathReward(timeout_s=60.0)  # a busy machine must not decide
    samples = [as_sample([ChatMessage("assistant", row["reply"])], row["ground_truth"], {}) for row in graded]
    wrong = [
        row for row, score in zip(graded, reward.score_batch(samples), strict=True) if score != row["right"]
    ]
    reward.close()
    assert len(graded) == 190
    assert [(row["kind"], row["right"]) for row in wrong] == [("matter of choice", False)]


def test_neither_sympy_nor_math_verify_is_loaded_by_the_trainer():
    code = (
        "import sys; from rl4llm.rewards import MathReward, check_examples; reward = MathReward(); "
        "before = set(sys.modules); check_examples([reward]); reward.close(); "
        "print([name for name in set(sys.modules) - before if name.split('.')[0] in ('sympy', 'math_verify')])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("extract", ["auto", "tag", "boxed", "hash", "answer", "last_number"])
def test_the_examples_hold_for_every_way_of_extraction(reward, extract):
    made = MathReward(extract=extract)
    made.pool = reward.pool  # whose processes have started
    check_examples([made])


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("\\dfrac{7}{20}", "\\frac{7}{20}"),
        ("0.35", "\\frac{7}{20}"),
        ("(1, 2]", "(1,2]"),
        ("5, 3", "3, 5"),
        ("\\{3, 5\\}", "3, 5"),
        ("\\left(-\\infty, 3\\right)", "(-\\infty,3)"),
        ("x = 3", "3"),
        ("3", "x=3"),
        ("2x+1", "1 + 2x"),
        ("(x-1)(x+1)", "x^2-1"),
        ("\\text{Tuesday}", "Tuesday"),
        ("(C)", "\\text{(C)}"),
        ("1024", "2^{10}"),
        ("3628800", "10!"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        ("413_5", "413_{5}"),
        ("\\frac{\\pi}{2}", "\\pi/2"),
        ("\\frac{1}{e^{40}}", "e^{-40}"),
        ("\\sqrt{17}", "4.123105625617661"),
        ("6 \\text{ and } 8x", "8x, 6"),
    ],
)
def test_equal_answers_are_right_however_they_are_written(reward, answer, gold):
    assert grade(reward, answer, gold) == 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("3 \\text{ or } 5", "3"),
        ("3, 5", "3"),
        ("(2,1)", "(1,2)"),
        ("[1,2]", "(1,2)"),
        ("stew", "west"),
        ("\\text{seat}", "\\text{east}"),
        ("413_6", "413_5"),
        ("2x - y + 2z - 18 = 0", "0"),
        ("x", "18"),
        ("18x", "18"),
        ("18 million", "18"),
        ("\\emptyset", "0"),
        ("\\frac{1}{2^{59}}", "\\frac{1}{2^{60}}"),
        ("\\frac{1}{21!}", "\\frac{1}{20!}"),
        ("e^{-41}", "e^{-40}"),
        (
            "\\begin{pmatrix} -3 & 7 \\\\ 0 & -3 \\end{pmatrix}",
            "\\begin{pmatrix} -3 & 0 \\\\ 0 & -3 \\end{pmatrix}",
        ),
        ("a_{k=6}", "k=6"),
        ("x = 7 = 11", "11"),
        ("18 \\approx 17.5", "18"),
        ("x = x", "5"),
        ("x = 3", "y = 3"),
        ("\\boxed{3, 3} \\boxed{,}", "18"),
        ("2020 - 5 + 3", "2020-05-03"),
        ("2y+1", "2x+1"),
        (
            "\\bigoplus 5 \\parallel 7",
            "\\bigoplus 6 \\parallel 7",
        ),  # computer algebra reads neither, and takes no number out of it
    ],
)
def test_different_answers_are_wrong_however_close_they_look(reward, answer, gold):
    assert grade(reward, answer, gold) == 0.0


@pytest.mark.parametrize(
    ("reply", "gold", "expected"),
    [
        ("\\boxed{17}, no: \\boxed{18}", "18", {"last": 1.0, "first": 0.0, "all": 0.0, "none": 0.0}),
        ("\\boxed{18}, no: \\boxed{17}", "18", {"last": 0.0, "first": 1.0, "all": 0.0, "none": 0.0}),
        ("\\boxed{18}, that is \\boxed{18.0}", "18", {"last": 1.0, "first": 1.0, "all": 1.0, "none": 1.0}),
        ("\\boxed{x(x+1)}, so \\boxed{x^2+x}", "x+x^2", {"last": 1.0, "first": 1.0, "all": 1.0, "none": 0.0}),
        ("\\boxed{x+y}, so \\boxed{x^2+x}", "x+x^2", {"last": 1.0, "first": 0.0, "all": 0.0, "none": 0.0}),
        (
            "".join(f"\\boxed{{{n}}} " for n in range(19)),
            "18",
            {"last": 0.0, "first": 0.0, "all": 0.0, "none": 0.0},
        ),
        ("\\boxed{18}", "18", {"last": 1.0, "first": 1.0, "all": 1.0, "none": 1.0}),
        ("The answer is 18.", "18", {"last": 1.0, "first": 1.0, "all": 1.0, "none": 1.0}),
        (
            "\\boxed{17} then \\boxed{16} <answer>18</answer>",
            "18",
            {"last": 1.0, "first": 1.0, "all": 1.0, "none": 1.0},
        ),
    ],
)
def test_different_boxed_answers_follow_the_policy(policies, reply, gold, expected):
    said = [ChatMessage("assistant", reply)]
    assert {name: reward(said, gold) for name, reward in policies.items()} == expected


@pytest.fixture(scope="module")
def policies(reward):
    rewards = {name: MathReward(several_boxed=name) for name in ("last", "first", "all", "none")}
    for made in rewards.values():
        made.pool = reward.pool
    return rewards


def test_boxes_are_ignored_if_extract_is_hash():
    reward = MathReward(extract="hash", several_boxed="none")
    assert reward([ChatMessage("assistant", "\\boxed{1} \\boxed{2}\n#### 18")], "18") == 1.0


def test_boxes_in_boxes_are_not_compared_one_by_one(policies, monkeypatch):
    asked = []
    monkeypatch.setattr(math_module, "same", lambda gold, answer: asked.append(answer))
    nested = "\\boxed{" * 1000 + "1" + "}" * 1000
    assert policies["all"]([ChatMessage("assistant", nested + "\\boxed{" * 1000)], "2") == 0.0
    assert len(asked) < 100


def test_reasons_for_zero_are_noted_unless_the_answer_is_wrong(reward):
    samples = [finished("no idea", "x"), finished("\\boxed{9^{9^9}}", "x+1"), finished("\\boxed{17}", "18")]
    scores = score(samples, [reward])
    assert scores.reward.tolist() == [0.0, 0.0, 0.0]
    assert [list(sample.extras.get("reward_notes", {}).values()) for sample in samples] == [
        ["no_answer"], ["refused: an astronomical power"], [],
    ]  # fmt: skip


def test_only_what_the_policy_wrote_is_graded(reward):
    shots = [
        ChatMessage("user", "1+1?"),
        ChatMessage("assistant", "\\boxed{2}"),
        ChatMessage("user", "again?"),
    ]
    silent = SampleState("p", 0, shots, "2", init_msg_size=3)
    assert score([silent], [reward]).reward.tolist() == [0.0]


def test_a_later_environment_message_does_not_hide_the_answer(reward):
    sample = finished("\\boxed{18}", "18")
    sample.messages.append(ChatMessage("user", "Thank you, 17 was expected."))
    assert score([sample], [reward]).reward.tolist() == [1.0]


@pytest.mark.parametrize(
    "gold",
    ["18", 18, 18.0, "#### 18", "She has 9 * 2 = 18.\n#### 18", "so \\boxed{18}", ["17", "18"], ("18",)],
)
def test_ground_truth_may_be_string_number_solution_or_list(reward, gold):
    assert grade(reward, "18", gold) == 1.0
    assert grade(reward, "19", gold) == 0.0


MISSING = "None|None.|NA|n/a|NULL|\\text{proof}|notfound|Not found|-|?|...|[]|see solution"
SENTENCE = "Natalia sold 24 clips in May and 72 clips in 2 months."
NO_ANSWERS = [None, "", "  ", [], [None], True, {"answer": 1}, "####", "x" * 5000, math.nan, "1) 2; 2) 3"]
NO_ANSWERS += [SENTENCE, "<think>18", "<answer></answer>", ["18", "proof"], *MISSING.split("|")]


@pytest.mark.parametrize("gold", NO_ANSWERS)
def test_an_invalid_ground_truth_fails_its_sample_alone(reward, gold):
    with pytest.raises(DataError):
        grade(reward, "18", gold)
    samples = [finished("\\boxed{18}", gold), finished("\\boxed{18}", "18")]
    assert score(samples, [reward]).reward.tolist()[1] == 1.0
    assert "ground_truth=" in samples[0].failure


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        ("\\boxed 5", ["5"]),
        ("The solutions are $\\boxed{1}$ and $\\boxed{-2}$.", ["1, -2"]),
        ("$21,16$ or $11$", ["21,16 or 11"]),
        ("First we add 9 and 9 to the total of all. Final Answer: The answer is $18$.", ["18"]),
        ("The answer is 18.", ["18"]),
        ("Answer: B", ["B"]),
        ("Answer: 3 hours and 20 minutes", ["3 hours and 20 minutes"]),
        ("No answer is possible", ["No answer is possible"]),
        ("9 * 2\n#### 18\nDone", ["18"]),
        ("none", ["none"]),
        ("no solution", ["no solution"]),
        ("<think>a</think>\n<answer> $\\boxed{3}$ </answer>", ["3"]),
        ("<answer>Apollo 11</answer>", ["Apollo 11"]),
        ("[ANSWER] 3 [/ANSWER]", ["3"]),
        ("<|begin_of_box|>3<|end_of_box|>", ["3"]),
        ("<think>2</think> 3", ["3"]),
        ("['18', \"eighteen\"]", ["18", "eighteen"]),
        ("[1, 2]", ["[1, 2]"]),
        ("9 (red apples)", ["9 red apples"]),
        ("$\\frac12$ (hours)", ["\\frac12 hours"]),
        ("3 (mod n)", ["3 (mod n)"]),
        ("&= 3 \\\\", ["3"]),
        ("{\\bf 3},", ["3"]),
        ("\\textcolor{red}{\\frac{1}{2}};", ["\\frac{1}{2}"]),
        ("\\underline{3} and \\underline{4}", ["\\underline{3} and \\underline{4}"]),
        ('**"Paris"**', ["Paris"]),
        (
            "\\text{the set of all points that are not on the line}",
            ["\\text{the set of all points that are not on the line}"],
        ),
        ([0.5, "1/2"], ["0.5", "1/2"]),
    ],
)
def test_an_answer_is_found_in_a_ground_truth(gold, answers):
    assert accepted_answers(gold) == answers


@pytest.mark.parametrize(
    ("options", "gold", "paid"),
    [
        ({}, "x" * 401, False),
        ({}, ["x" * 401, "18"], True),
        ({}, "x^2 + 1", True),
        ({"extract": "last_number"}, "x^2 + 1", False),
        ({"extract": "last_number"}, "18", True),
        ({"extract": "boxed"}, "\\frac{1}{2", False),
        ({"extract": "tag"}, "a{b", True),
    ],
)
def test_an_answer_that_no_reply_can_give_is_a_fault(options, gold, paid):
    with contextlib.nullcontext() if paid else pytest.raises(DataError):
        MathReward(**options).check_row(gold, {})


FORMS = (
    "So it is $\\boxed{%s}$.", "<think>a</think>\n<answer>%s</answer>", "<answer>$%s$</answer>", "Therefore we get $%s$.",
    "Final Answer: %s", "We add them up.\nSo the result is %s.", "It follows.\n\n**%s**", "The result is **%s**.", "%s",
    "$%s$", "The answer is %s.", "Thus \\(%s\\)", "Hence\n\\[\n%s\n\\]", "9*2\n#### %s", "<answer>\\boxed{%s}</answer>",
)  # fmt: skip
PAIRS = [  # a ground truth, and wrong answers made from it: a sign, a digit, half a list, another unit, an inner number
    ("\\frac{3}{4}", ["4", "3", "-\\frac{3}{4}", "\\frac{3}{5}", "2^{\\frac{3}{4}}"]),
    ("-12", ["12", "-13", "x^{-12}", "2x + y = -12", "x \\geq -12"]),
    ("1,234", ["234", "1,235", "1, 234", "1.234"]),
    ("2\\sqrt{3}", ["3", "2", "2\\sqrt{5}", "\\sqrt{3}"]),
    ("(3, -1)", ["-1", "(3, 1)", "(-1, 3)", "-(3, -1)", "[3, -1]"]),
    ("2, 5, 7", ["2", "7", "2, 5", "2, 5, 8"]),
    ("x^2 + 1", ["1", "x^2", "x^2 - 1", "x^3 + 1"]),
    ("(-\\infty, 2]", ["2", "(-\\infty, 2)", "[2, \\infty)"]),
    ("12\\text{ cm}^2", ["12\\text{ cm}^3", "12\\text{ m}^2", "2", "13\\text{ cm}^2"]),
    ("64\\%", ["64000", "6.4\\%", "65\\%"]),
    ("\\text{Friday}", ["\\text{Monday}", "\\text{day}"]),
    ("3:4", ["3", "4", "4:3"]),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", ["2", "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}"]),
    ("6.5 \\times 10^{-7}", ["10^{-7}", "6.5 \\times 10^{-8}", "7"]),
    ("y = 2x", ["2", "y = 3x"]),
]


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_a_reply_changes_no_score(reward, form):
    right = [finished(form % gold, gold) for gold, _ in PAIRS]
    assert reward.score_batch(right) == [1.0] * len(PAIRS)
    wrong = [finished(form % answer, gold) for gold, answers in PAIRS for answer in answers]
    paid = [
        sample.messages[1].content
        for sample, score in zip(wrong, reward.score_batch(wrong), strict=True)
        if score
    ]
    assert paid == []


def test_equal_questions_are_asked_once(reward):
    before = reward.pool.counts["tasks"]
    assert reward.score_batch([finished("\\boxed{x+1}", "1+x") for _ in range(8)]) == [1.0] * 8
    assert reward.pool.counts["tasks"] == before + 1


def test_numbers_need_no_worker_at_all():
    reward = MathReward()
    assert reward.score_batch([finished("\\boxed{1,234}", "1234"), finished("Answer: 17", "18")]) == [
        1.0,
        0.0,
    ]
    assert reward.pool.counts == {"tasks": 0, "remembered": 0}


@pytest.mark.parametrize("options", [{"extract": "box"}, {"several_boxed": "all_equal"}])
def test_unknown_options_are_refused_with_what_is_known(options):
    with pytest.raises(ConfigError):
        MathReward(**options)
