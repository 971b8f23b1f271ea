"""The pieces of a new task: its module, its test and its example rows."""

from __future__ import annotations

from typing import Any

HEAD = '''"""A task for rl4llm: what is right, and what the policy may do. Change it, then run `rl4llm check task.yaml`."""
'''

REWARD = '''

class Right(BaseRewardFunction):
    """1.0 for a right answer, else 0.0; `rl4llm check` compares it with its examples."""

    success_at = 1.0  # the lowest score that counts as a success in the logs

    def __init__(self, name="right"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **columns):  # columns: all others of the row
        return right(final_reply(messages), ground_truth)

    def examples(self):
        return [RewardExample([ChatMessage("assistant", said)], truth, score) for said, truth, score in EXAMPLES]
'''

RIGHT = {
    "number": '''

def right(said, ground_truth):
    """Return 1.0 if the last number of a reply is the ground truth."""
    numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", said.replace(",", ""))
    truths = re.findall(r"-?\\d+(?:\\.\\d+)?", str(ground_truth).replace(",", ""))
    return float(bool(numbers and truths) and float(numbers[-1]) == float(truths[-1]))


EXAMPLES = [("It is 19.", "19", 1.0), ("12 + 7 = 20", "19", 0.0), ("I do not know.", "19", 0.0)]
''',
    "text": '''

def plain(text):
    """Return a text in small letters, without white space and a full stop around it."""
    return str(text).strip().rstrip(".").strip().casefold()


def right(said, ground_truth):
    """Return 1.0 if the last line of a reply is the ground truth."""
    lines = said.strip().splitlines()
    return float(bool(lines) and plain(lines[-1]) == plain(ground_truth))


EXAMPLES = [("Let me see.\\nParis.", "paris", 1.0), ("Rome", "Paris", 0.0), ("", "Paris", 0.0)]
''',
    "own": '''

def right(said, ground_truth):
    """Return the share of the ground truth's words that a reply has. Write here what is right in your task."""
    wanted = set(str(ground_truth).casefold().split())
    return len(wanted & set(re.findall(r"\\w+", said.casefold()))) / max(1, len(wanted))


EXAMPLES = [("The river has a stone.", "river stone", 1.0), ("A river.", "river stone", 0.5), ("", "river stone", 0.0)]
''',
}

TOOLS = {
    "none": "",
    "function": '''

def calculate(first: float, operator: str, second: float) -> str:
    """Calculate with two numbers.

    Args:
        first: The first number.
        operator: One of + - *.
        second: The second number.
    """
    results = {"+": lambda: first + second, "-": lambda: first - second, "*": lambda: first * second}
    if operator not in results:
        raise ToolError("the operator must be one of + - *")  # the model's mistake: it reads this
    return f"{results[operator]():g}"
''',
    "sqlite": '''

TABLES = """
create table items (name text, price integer);
insert into items values ('pen', 2), ('book', 12), ('lamp', 30), ('desk', 90), ('chair', 45);
"""  # for rows without a column `tables`


class Sql(ToolSet):
    """A database for each episode, in memory."""

    def open(self, sample):
        opened = Sql()
        opened.db = sqlite3.connect(":memory:")
        opened.db.executescript(sample.columns.get("tables") or TABLES)
        opened.db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # no other files
        opened.db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)  # bytes of a value
        opened.db.set_progress_handler(lambda: 1, 10_000_000)  # interrupts queries that do not end
        return opened

    def close(self):
        if hasattr(self, "db"):
            self.db.close()

    @tool
    def query(self, sql: str) -> str:
        """Query the database with SQL.

        Args:
            sql: One SELECT, such as select name from sqlite_master.
        """
        try:
            return str(self.db.execute(sql).fetchmany(20))
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ToolError(str(error)) from error  # the model's mistake: it reads this
''',
    "picture": '''

class Camera(ToolSet):
    """A picture for each episode, with as many squares as its row says."""

    def open(self, sample):
        opened = Camera()
        opened.squares = int(sample.columns.get("squares", 3))
        return opened

    @tool
    def look(self):
        """Look at the picture."""
        picture = PIL.Image.new("RGB", (28 * (2 * self.squares + 1), 84), "white")
        for place in range(self.squares):
            picture.paste("red", (28 * (2 * place + 1), 28, 28 * (2 * place + 2), 56))
        return read_picture(picture)
''',
}

ENVIRONMENT = '''

class Task(BaseMDPEnv):
    """Tells the policy that an answer is wrong, until it is right or env.max_steps turns are over."""

    def respond(self, sample):
        if right(sample.last_message.content, sample.ground_truth) >= 1.0:
            return []  # the episode ends
        return [ChatMessage("user", "That is not right. Try again.")]
'''

TEST = '''"""The parts of the task do what they should: pytest test_task.py"""
'''

TEST_REWARD = """

def test_the_reward_gives_its_examples_their_scores():
    check_examples([task.Right()])
"""

TESTS = {
    "none": "",
    "function": """

def test_the_tool_calculates():
    assert task.calculate(12, "*", 3) == "36"
""",
    "sqlite": """

def test_each_episode_has_a_database():
    opened = task.Sql().open(SampleState("", 0, [], "", {}))
    assert opened.query("select price from items where name = 'book'") == "[(12,)]"
    endless = "with recursive n(x) as (select 1 union all select x from n) select count(*) from n"
    refused = {"select * from nowhere": "no such table", "attach 'x' as y": "too many attached", endless: "interrupted"}
    for sql, error in refused.items():
        with pytest.raises(ToolError, match=error):
            opened.query(sql)
    opened.close()
""",
    "picture": """

def test_each_episode_has_a_picture():
    few, many = (task.Camera().open(SampleState("", 0, [], "", {"squares": count})).look() for count in (1, 4))
    assert (size_of(few), size_of(many)) == ((84, 84), (84, 252))
""",
}

TEST_ENVIRONMENT = """

def test_the_episode_ends_with_a_right_answer():
    said, truth, _ = task.EXAMPLES[0]
    env = object.__new__(task.Task)
    assert env.respond(SampleState("", 0, [ChatMessage("assistant", said)], truth, {})) == []
    assert env.respond(SampleState("", 0, [ChatMessage("assistant", "")], truth, {}))
"""


def module(right: str, tools: str, turns: int) -> str:
    """Return the text of the task's module."""
    plays = tools == "none" and turns > 1
    standard = [name for name, wanted in (("re", right != "text"), ("sqlite3", tools == "sqlite")) if wanted]
    names = ["BaseRewardFunction", "ChatMessage"]
    names += ["BaseMDPEnv"] if plays else []
    names += {
        "none": [],
        "function": ["ToolError"],
        "sqlite": ["ToolError", "ToolSet", "tool"],
        "picture": ["ToolSet", "tool"],
    }[tools]
    imports = [f"import {name}" for name in standard] + ([""] if standard else [])
    imports += ["import PIL.Image"] if tools == "picture" else []
    imports += [f"from rl4llm import {', '.join(sorted(names, key=lambda name: (name.islower(), name)))}"]
    imports += [
        "from rl4llm.core.base_env import RewardExample",
        *(["from rl4llm.data.images import read_picture"] if tools == "picture" else []),
        "from rl4llm.core.base_reward import final_reply",
    ]
    pieces = [RIGHT[right], REWARD, TOOLS[tools], ENVIRONMENT if plays else ""]
    return "\n".join([HEAD, *imports, ""]) + "".join(pieces)


def test(tools: str, turns: int) -> str:
    """Return the text of the task's test."""
    plays = tools == "none" and turns > 1
    names = (["ToolError"] if tools == "sqlite" else []) + (["ChatMessage"] if plays else [])
    imports = ["import pytest"] if tools == "sqlite" else []
    imports += ["import task", ""] + ([f"from rl4llm import {', '.join(names)}"] if names else [])
    imports += ["from rl4llm.core.base_env import SampleState"] if names or tools == "picture" else []
    imports += ["from rl4llm.data.images import size_of"] if tools == "picture" else []
    imports += ["from rl4llm.rewards import check_examples", ""]
    return "\n".join([TEST, *imports]) + TEST_REWARD + TESTS[tools] + (TEST_ENVIRONMENT if plays else "")


def rows(right: str, tools: str, split: str) -> list[dict[str, Any]]:
    """Return example rows of a split; no row is in both."""
    first, count = (0, 48) if split == "train" else (48, 12)
    return [_row(right, tools, number) for number in range(first, first + count)]


def _row(right: str, tools: str, number: int) -> dict[str, Any]:
    if tools == "sqlite":
        prices = [((number + 1) * factor) % 97 + 1 for factor in (3, 7, 11, 13)]
        values = ", ".join(f"('item{place}', {price})" for place, price in enumerate(prices))
        limit = 10 + number
        answer = str(sum(price > limit for price in prices)) if right == "number" else "item0"
        asked = f"How many rows of the table items have a price above {limit}? Answer with a number."
        asked = asked if right == "number" else "Which name has the first row of the table items?"
        tables = f"create table items (name text, price integer); insert into items values {values};"
        return {"prompt": asked, "ground_truth": answer, "tables": tables}
    if tools == "picture":
        asked, count = (
            f"How many squares does picture {number + 1} show? Look at it. Answer with a number.",
            1 + number % 5,
        )
        return {"prompt": asked, "ground_truth": str(count), "squares": count}
    one, other = 2 + number % 13, 3 + number // 5
    if right == "number":
        return {"prompt": f"What is {one} + {other}?", "ground_truth": str(one + other)}
    words = ("river", "stone", "cloud", "apple", "train", "music", "paper", "glass", "horse", "winter")
    chosen = f"{words[number % 10]} {words[(number // 10 + number + 1) % 10]}"
    asked = (
        "Repeat these two words and write nothing else"
        if right == "text"
        else "Write a sentence with these words"
    )
    return {"prompt": f"{asked}: {chosen}", "ground_truth": chosen}
