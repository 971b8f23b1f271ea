"""The rewards and data of recipes that have their own."""

import asyncio
import importlib
import json
import shutil

import pytest
from forked_python import python

from rl4llm.core.types import ChatMessage
from rl4llm.extensions.recipes.recipe import RECIPES
from rl4llm.extensions.tasks.grade import Tasks
from rl4llm.extensions.workspaces import Workspaces


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a module of the recipe of the same name."""

    def imported(name):
        monkeypatch.syspath_prepend(str(RECIPES / name))
        return importlib.import_module(name)

    return imported


@pytest.mark.parametrize(("reply", "score"), [
    ("<reversed_text>cba</reversed_text>", 1.0),
    ("Here it is: <reversed_text>\ncba\n</reversed_text>", 1.0),
    ("<reversed_text>cb</reversed_text>", 0.8),
    ("<reversed_text>xyz</reversed_text>", 0.0),
    ("cba", 0.0),
])  # fmt: skip
def test_reward_is_the_similarity_to_the_reversed_text(reply, score, module):
    reward = module("reverse_text").Reversed()
    found = reward([ChatMessage("user", "abc"), ChatMessage("assistant", reply)], "abc")
    assert found == pytest.approx(score)


FOLLOWED = {
    "Use only lowercase letters.": ("the sea is deep blue.", "The sea is deep blue."),
    "Use only CAPITAL LETTERS.": ("THE SEA IS DEEP BLUE.", "The SEA IS DEEP BLUE."),
    "Use no commas.": ("The sea is deep blue", "The sea, it is blue"),
    "Use at most ten words.": ("sea b c d e f g h i j", "sea b c d e f g h i j k"),
    "Write exactly three sentences.": ("A sea. Two! Is 3.5 three?", "A sea. Two. Three. Four five"),
    "Write exactly three lines, each beginning with '- '.": ("- a sea\n- b\n\n- c", "- a sea\n- b\nc d"),
    "End with the words: That is all.": ("The sea. That is all.", "That is all. The sea."),
    "Put the whole answer in double quotes.": ('"The sea is deep blue"', 'The "sea" is deep blue'),
    'Answer with a JSON object with the keys "title" and "text".': (
        '{"title": "a sea", "text": "b c"}',
        '{"title": "the deep blue sea"}',
    ),
}


def test_reward_is_1_only_if_the_instruction_is_followed(module):
    instructions = module("instructions")
    assert FOLLOWED.keys() == instructions.INSTRUCTIONS.keys()
    reward = instructions.Follows()
    for instruction, replies in FOLLOWED.items():
        scores = [
            reward([ChatMessage("assistant", reply)], instruction, topic="the sea")
            for reply in (*replies, " ")
        ]
        assert scores == [1.0, 0.0, 0.0], instruction


@pytest.mark.parametrize("reply", ["sea", "The moon is big and round"])
def test_reward_is_0_for_a_reply_that_leaves_the_topic_out(reply, module):
    reward = module("instructions").Follows()
    assert reward([ChatMessage("assistant", reply)], "Use no commas.", topic="the sea") == 0.0


@pytest.mark.parametrize("script", ["calculator/data.py", "code/data.py", "instructions/instructions.py"])
def test_no_held_out_problem_is_trained_on(script, tmp_path):
    assert python(RECIPES / script, tmp_path / "data", cwd=tmp_path).returncode == 0
    rows = {
        name: [json.loads(line) for line in (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    }
    asked = {name: {json.dumps(row) for row in found} for name, found in rows.items()}
    assert len(rows["test"]) >= 60 and len(rows["train"]) > len(rows["test"])
    assert len(asked["train"]) == len(rows["train"]) and not asked["train"] & asked["test"]


@pytest.fixture(scope="module")
def shell_tasks(tmp_path_factory):
    """Return the rows of both splits of the recipe `shell`."""
    directory = tmp_path_factory.mktemp("shell")
    done = python(RECIPES / "shell" / "data.py", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {split: directory / f"{split}.jsonl" for split in ("train", "test")}
    return {
        split: [json.loads(line) for line in file.read_text().splitlines()] for split, file in files.items()
    }


def test_held_out_tasks_in_a_shell_have_other_words(shell_tasks):
    words = {
        split: {word for row in rows for text in row["files"].values() for word in text.split()}
        for split, rows in shell_tasks.items()
    }
    assert len(words["train"]) > 20 and not words["train"] & words["test"]
    names = {split: {name for row in rows for name in row["files"]} for split, rows in shell_tasks.items()}
    assert not names["train"] & names["test"]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap (scripts/install_sandbox.sh)")
def test_a_task_in_a_shell_is_solved_by_its_command_alone(shell_tasks):
    async def rewards(tasks, row):
        workspace = await tasks.open(row)
        for name, text in row["files"].items():
            await workspace.write(f"/work/{name}", text.encode())
        before = await tasks.grade(row, workspace)
        await tasks.solve(row, workspace)
        after = await tasks.grade(row, workspace)
        await workspace.close()
        return before.reward, after.reward

    async def all_of(pool, rows):
        return await asyncio.gather(*(rewards(Tasks(pool), row) for row in rows))

    rows = shell_tasks["test"][:11]  # one of each kind
    assert len({row["prompt_id"].split("-")[0] for row in rows}) == 11
    pool = Workspaces(count=4)
    assert asyncio.run(all_of(pool, rows)) == [(0.0, 1.0)] * 11
    pool.close()
