"""A run is what its keys name: rows, chat template, tokenizer, weights, and the code of its user."""

import importlib
import json
import sys
from functools import partial

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from small_run import CONFIG

from rl4llm.compose import build_trainer
from rl4llm.compose.identity import Identity, code_digest, rows_digest
from rl4llm.config import load_config
from rl4llm.core.errors import RunDirError

MODULE = """from functools import partial, wraps
from identity_helper import SIGN

class Object:
    def __call__(self, completions, **columns):
        return [0 for text in completions]

def listed(function):
    return wraps(function)(lambda *args, **columns: list(function(*args, **columns)))


@listed
def score(completions, **columns):
    \"\"\"Score.\"\"\"
    return [-SIGN * len(text) for text in completions]  # negated

THINGS = {"score": score, "object": Object(), "part": partial(score, sign=1), "method": Object().__call__}
"""
HELPER = """SIGN = 1


def unused():
    from identity_far import FAR
    return FAR
"""
FAR = "FAR = 1\n"
FILES = {"identity_far": FAR, "identity_helper": HELPER, "identity_user": MODULE}
EDITS = {
    "comment": ("# negated", "# the sign", False),
    "docstring": ('    """Score."""\n', "", False),
    "lines": ("@listed\ndef", "\n\n@listed\n\ndef", False),
    "expression": ("-SIGN * len", "SIGN * len", True),
    "method": ("[0 for text", "[1 for text", True),
    "imported": ("SIGN = 1", "SIGN = -1", True),
    "imported by an import": ("FAR = 1", "FAR = -1", True),
}


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Return a function that writes and imports the module of a user and its helper, with a text replaced in them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(old="", new=""):
        for name, text in FILES.items():
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if old else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return [importlib.import_module(name) for name in FILES][-1]

    yield load
    for name in FILES:
        sys.modules.pop(name, None)


def digests(module):
    identity = Identity()
    for name, thing in module.THINGS.items():
        identity.add_code([thing])
        identity.code[name] = identity.code.popitem()[1]
    return identity.code


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_of_code_is_seen_and_of_its_looks_is_not(imported, edit):
    old, new, changed = EDITS[edit]
    assert (MODULE + HELPER + FAR).count(old) == 1
    before, after = digests(imported()), digests(imported(old, new))
    assert {name for name in before if before[name] != after[name]} == (
        set(before) - {"rl4llm"} if changed else set()
    )


def test_code_of_a_notebook_has_a_digest_without_its_state():
    cell = (
        "LOG = []\ndef score(completions, **columns):\n    LOG.append(1)\n    return [1] * len(completions)\n"
    )

    def ran(text):
        names = {"__name__": "__main__"}
        exec(text, names)
        return names["score"]

    score = ran(cell)
    first = code_digest(score)
    score(["x"])
    assert code_digest(score) == code_digest(ran("\n# again\n" + cell)) == first
    assert code_digest(ran(cell.replace("[1] *", "[-1] *"))) != first


def test_rows_have_one_digest_in_any_order_of_columns():
    class Thing:
        """A value whose text is an address."""

    row = {"messages": [{"role": "user", "content": "a"}], "ground_truth": {"x", "y", "z"}, "extra": Thing()}
    same = dict(reversed(row.items())) | {"extra": Thing()}
    assert rows_digest([row, {1: 2, "a": 3}]) == rows_digest([same, {1: 2, "a": 3}])
    first, second = (np.array([f"{0}a", [1]], dtype=object) for _ in range(2))  # as pandas reads lists
    assert rows_digest([row | {"extra": first}]) == rows_digest([row | {"extra": second}])
    for name in ("messages", "ground_truth", "extra"):
        assert rows_digest([row]) != rows_digest([row | {name: "other"}])
    assert rows_digest([row, row | {"extra": 1}]) != rows_digest([row | {"extra": 1}, row])


def test_rows_of_one_name_in_two_places_have_two_digests():
    identity = Identity()
    for text in "ab":
        identity.add_rows("data, train", [{"messages": text}])
    assert len(set(identity.contents.values())) == 2


def heavier(path):
    file = path / "base/model.safetensors"
    save_file({name: value * 1.5 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


def replaced(name, old, new, path):
    file = path / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


KL = {"algorithm.kl_coef": 0.5}
DPO = {"algorithm": {"name": "dpo"}, "data.path": "pairs.jsonl", "rollout": {"prompts": 2}, "rewards": None}
CONTENTS = {
    "rows": ({}, partial(replaced, "rows.jsonl", "Say 3", "Tell 3"), "rows of rows.jsonl"),
    "truths": ({}, partial(replaced, "rows.jsonl", '"5"', '"6"'), "rows of rows.jsonl"),
    "held-out": ({}, partial(replaced, "held.jsonl", "Say 3", "Tell 3"), "rows of held.jsonl"),
    "template": (
        {},
        partial(replaced, "base/chat_template.jinja", "assistant", "bot"),
        "chat template of base",
    ),
    "tokenizer": (
        {},
        partial(replaced, "base/tokenizer.json", '"vocab"', '"ignore_merges": true, "vocab"'),
        "tokenizer of",
    ),
    "reference": (KL, heavier, "weights of the reference"),
    "reference of pairs": (DPO, heavier, "weights of the reference"),
}


@pytest.fixture
def started(model_dir, tmp_path, monkeypatch, imported):
    """Return a function that starts a run on copies of the files that it names, again or for the first time."""
    monkeypatch.chdir(tmp_path)
    imported()
    (tmp_path / "base").mkdir()
    for file in model_dir.iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    for name, count in (("rows", 8), ("held", 4)):
        rows = ({"prompt": f"Say {i}", "ground_truth": str(i)} for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pairs = (f'{{"prompt": "Say {i}", "chosen": "yes", "rejected": "no"}}\n' for i in range(8))
    (tmp_path / "pairs.jsonl").write_text("".join(pairs))

    def start(max_steps, force=False, **keys):
        paths = {
            "model.path": "base",
            "data": {"path": "rows.jsonl"},
            "eval": {"path": "held.jsonl", "every": 9},
        }
        paths |= {"rewards": ["identity_user:score"], "output.dir": "run", "max_steps": max_steps}
        kept = {
            name: part
            for name, part in CONFIG.items()
            if name not in ("data", "rewards", "eval", "max_steps")
        }
        with build_trainer(load_config(None, kept | paths | keys), force=force) as trainer:
            trainer.train()
        return trainer

    return start


@pytest.mark.parametrize("change", CONTENTS)
def test_a_resumed_run_refuses_other_contents(started, tmp_path, change):
    keys, edit, name = CONTENTS[change]
    keys = keys | ({"eval": {"every": 0}} if keys is DPO else {})
    started(1, **keys)
    assert started(2, **keys).run.changes == ("max_steps: 1 -> 2",)
    edit(tmp_path)
    with pytest.raises(RunDirError, match=name):
        started(3, **keys)
    started(3, force=True, **keys)
    started(4, **keys)
    identity = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps(identity | {"contents": {}}))  # of an older version
    started(5, **keys)


def test_other_held_out_rows_by_another_key_are_no_other_run(started):
    started(1)
    started(2, eval={"path": "held.jsonl", "every": 9, "limit": 2})


def test_a_resumed_run_names_the_code_that_changed(started, tmp_path, imported, capsys):
    started(1)
    started(2)
    alerts = tmp_path / "run/alerts.jsonl"
    assert "code of" not in capsys.readouterr().out + alerts.read_text()
    imported("-SIGN * len", "SIGN * len")
    started(3)
    assert "The code of `score` changed at step 2." in capsys.readouterr().out
    (alert,) = map(json.loads, alerts.read_text().splitlines())
    assert (alert["since"], alert["seen"]) == (2, "the code of `score` changed at step 2")
    started(4)
    assert "code of" not in capsys.readouterr().out


ROLES = '''
from rl4llm.algorithms import GRPO
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.core.base_env import BaseRewardFunction


class Mine(BaseRewardFunction):
    def __init__(self, name="mine"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **columns):
        return 1.0


class Env(ToolMDPEnv):
    """A subclass."""


class Method(GRPO):
    """A subclass."""


def mixed(rewards):
    return sum(rewards.values())


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: what to look up.
    """
    return word
'''


def test_code_of_every_part_belongs_to_a_run(started, tmp_path):
    (tmp_path / "identity_helper.py").write_text(ROLES)
    sys.modules.pop("identity_helper")
    user = "identity_helper:"
    tools = {"tools": [f"{user}lookup"], "describe_tools": False, "max_steps": 2}
    env = {"name": f"{user}Env", "reward_transform_fn": f"{user}mixed", **tools}
    keys = {"env": env, "rewards": [f"{user}Mine"], "algorithm": {"name": f"{user}Method"}}
    (code,) = started(0, **keys).code.values()
    assert code.keys() == {"Mine", "Env", "Method", "mixed", "lookup", "rl4llm"}
