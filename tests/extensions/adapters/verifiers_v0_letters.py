"""Environments for verifiers before 0.4, which its Python loads: one turn, several turns, tools, and rewards of groups."""

import os

import verifiers as vf
from datasets import Dataset


def letters(completion, answer, **kwargs):
    """The share of the answer's letters in the last reply."""
    text = completion[-1]["content"] or ""
    os.write(1, b"a library may print what it likes\n")
    return sum(letter in text for letter in answer) / len(answer)


def sums(completion, **kwargs):
    """A reward that changes with every letter."""
    return sum(map(ord, completion[-1]["content"] or "")) % 11 / 10


async def turns(state):
    return float(len(state["trajectory"]))


def shortest(completions, **kwargs):
    """A reward of a whole group: 1 for the shortest replies."""
    sizes = [len(completion[-1]["content"] or "") for completion in completions]
    return [float(size == min(sizes)) for size in sizes]


def unknown(completion, **kwargs):
    return float("nan")


def broken(completion, **kwargs):
    raise RuntimeError("the judge is away")


async def count(word: str) -> str:
    """Count the letters of a word.

    Args:
        word: the word.
    """
    return f"{len(word)} letters"


class Again(vf.MultiTurnEnv):
    """Asks for another word until there are three."""

    async def setup_state(self, state, **kwargs):
        state["asked"] = 0
        return state

    @vf.stop
    async def enough(self, state):
        return state["asked"] >= 2 and len(state["trajectory"]) >= 3

    async def env_response(self, messages, state, **kwargs):
        state["asked"] += 1
        return [{"role": "user", "content": f"Another with {state['answer']}, number {state['asked']}."}]


class Away(Again):
    """Loses what it needs after the first turn."""

    async def env_response(self, messages, state, **kwargs):
        raise vf.InfraError("the machine is away")


def load_environment(kind="single", words=30, evaluated=0):
    rows = [{"question": f"Say {'ab' * n}.", "answer": "ab", "info": {"n": n}} for n in range(1, words + 1)]
    given = {"dataset": Dataset.from_list(rows), "system_prompt": "Spell."}
    if kind == "shots":  # a dataset has each key of any message in all of them
        shots = [
            {"role": "user", "content": "Say a."},
            {"role": "assistant", "content": "a", "name": "shown"},
        ]
        said = [{"prompt": [*shots, {"role": "user", "content": "Say ab."}], "answer": "ab"}]
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[letters]), dataset=Dataset.from_list(said))
    if kind == "text":
        given = {"dataset": Dataset.from_list(rows), "message_type": "completion"}
    if evaluated:
        given["eval_dataset"] = Dataset.from_list(rows[:evaluated])
    pairs = {"group": [letters, shortest], "sums": [sums, shortest], "broken": [letters, broken]}
    pairs["unknown"] = [unknown, turns]
    pairs["broken_group"] = [shortest, broken]
    funcs = pairs.get(kind, [letters, turns])
    weights = [0.5, 0.25] if shortest in funcs else [0.5, 0.0]
    rubric = vf.Rubric(funcs=funcs, weights=weights)
    if kind == "tool":
        return vf.ToolEnv(tools=[count], rubric=rubric, max_turns=4, **given)
    if kind in ("multi", "away"):
        return (Again if kind == "multi" else Away)(rubric=rubric, **given)
    return vf.SingleTurnEnv(rubric=rubric, **given)
