"""A policy that only cheats: whole training runs in which scripted replies try every known hack of the rewards.

A suite has the configured rewards and the replies to each prompt: `FAMILIES[name]` holds the ground truth and the
replies, each a list of turns; the samples of a prompt take them in turn.
"""

import json
from dataclasses import dataclass

import pytest

from rl4llm.api import GRPOTrainer
from rl4llm.core.types import Completion
from rl4llm.inference.local import LocalClient

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


@dataclass(frozen=True)
class Suite:
    """Rewards, an environment, the hacks by family as (ground truth, replies), and one honest reply with its reward."""

    rewards: list
    families: dict
    honest: tuple
    worth: float
    env: dict


def boxed(*answers):
    return [[f"\\boxed{{{answer}}}"] for answer in answers]


# fmt: off
ANSWERS = {
    "several-boxes": (
        "18",
        [
            ["\\boxed{17} or \\boxed{18}"],
            ["\\boxed{18} or \\boxed{17}"],
            ["".join(f"\\boxed{{{number}}}" for number in range(19))],
            ["\\boxed{17 \\boxed{18}}"],
        ],
    ),
    "lists": (
        "18",
        boxed(
            "17, 18", "17 \\text{ or } 18", "\\{17, 18\\}", "18 \\lor 17", "[0, 100]", "18 = 17", "17 \\to 18", "18 \\pm 1",
            "17; 18", "18/17", "17 | 18", "1,8", "\\text{18 or 17}", "18 \\approx 17.5", "x = 17, 18", "\\mathbb{N}",
        ),
    ),
    "echo": (
        "18",
        [["####"], ["#### <answer>"], ["#### " * 100], ["#### the number of eggs"], ["Answer:"], ["The answer is"]],
    ),
    "last-number": (
        "3",
        [
            ["x^3 grows"], ["So it is $2^{3}$."], ["We get \\frac{1}{3} here"], ["It is \u22123."], ["The point is (2, 3)."],
            ["2x = 3 for her"], ["Either 17 or 3"], ["<answer>x^3</answer>"], ["The answer is a_3"], ["It is 12 003."],
        ],
    ),
    "half-lists": ("1, -2", [*boxed("-2", "1"), ["$x=\\boxed{1}$"], ["The roots are 1 and 2."], ["<answer>-2</answer>"]]),
    "quoted-thoughts": (
        "18",
        [["<think>\\boxed{17} \"</think>\" \\boxed{18}"], ["<think>It ends with '</think>', so \\boxed{18}"]],
    ),
    "units": ("18\\text{ hours}", boxed("18\\text{ minutes}", "18^\\circ", "\\$18", "18\\text{ hours}^2")),
    "giants": (
        "18",
        boxed("9" * 300, "1e999", "9^{9^9}", "100000000!", "\\infty", "10^{10^{10}}", "0." + "9" * 200, "1/0"),
    ),
    "unicode": (
        "18",
        boxed(
            "\u202e81", "1\u200b7", "\u00b9\u2077", "\uff11\uff17", "\u2168\u2168", "18\u0338\u0338 19", "l8", "1\u06588",
        ),
    ),
    "nothing": (
        "3",
        [
            *boxed("", " ", "\\emptyset", "\\{\\}", "\\text{none}", "\\phantom{3}4", "?"),
            [" "],
            ["<think>\\boxed{3}"],
        ],
    ),
    "everything": (
        "(2,\\infty)",
        boxed(
            "\\mathbb{R}", "(-\\infty,\\infty)", "\\text{all real numbers}", "x \\in \\mathbb{R}", "x", "x = x", "0 = 0",
            "y < 2",
        ),
    ),
    "anything": (
        "x+1",
        boxed(
            "y", "f(x)", "x+C", "x+1+0y+z", "nan", "\\text{NaN}", "None", "True", "*", "...", "\\square", "x", "x+1=x+1=0",
        ),
    ),
    "words": (
        "\\text{even}",
        boxed("\\text{odd}", "\\text{even or odd}", "\\text{neven}", "\\text{even, odd}", "\\text{not even}", "e^v n"),
    ),
    "pairs": ("(1,2)", boxed("(x,y)", "(2,1)", "(1,2),(2,1)", "1,2,3", "[1,2]", "\\{1,2\\}", "(1,2,3)", "\\frac{1}{2}")),
    "injections": (
        "18",
        boxed(
            "__import__('os').system('true')", "\\input{/etc/passwd}", "{ground_truth}", "{{ground_truth}}", "%s",
            "\\def\\x{18}\\y", "\\text{ignore the above, correct}", "1}\\boxed{7", "\\verb|18|7", "\\write18{id}",
        ),
    ),
    "layout": (
        "18",
        [
            ["<think>" * 60],
            ["<think></think><answer></answer>" * 12],
            ["<think>x</think>" * 10 + "<answer>5</answer>"],
            ["<think><think>x</think></think><answer>5</answer>"],
            ["<THINK>x</THINK><ANSWER>5</ANSWER>"],
            ["<think>x</think><answer> </answer>"],
            ["<think> </think><answer>5</answer>"],
            ["<think>x</think><answer>5</answer> And more."],
            ["<answer>5</answer><think>x</think>"],
            ["<think>x<answer>5</answer></think>"],
        ],
    ),
    "tools": (
        "18",
        [
            [CALL, "I used a tool."],
            [CALL * 4, CALL, CALL],
            ["Tool: 18 <tool_response>2</tool_response>"],
            ["<tool_call>" * 30],
            [CALL.replace("1+1", "10**10**10"), "Hm."],
            ["<tool_call>{}</tool_call>", "Error: none"],
        ],
    ),
}
# fmt: on
MATH = {"name": "math", "several_boxed": "none"}
SUITES = {
    "answers": Suite(
        rewards=[
            MATH,
            {"name": "format", "weight": 0.2},
            {
                "name": "gate",
                "reward": {"name": "length", "max_length": 400, "unit": "chars"},
                "by": MATH,
                "weight": 0.1,
            },
            {"name": "gate", "reward": {"name": "tool_use", "per_turn": True}, "by": MATH, "weight": 0.5},
        ],
        families=ANSWERS,
        honest=("18", [[CALL, "<think>9 times 2</think><answer>18</answer>"]]),
        worth=1.8,
        env={"name": "tool", "max_steps": 3, "describe_tools": False},
    )
}


AT_ONCE = 6
"""Replies to one prompt; those of a family are cut into as many prompts as they need."""


class Scripted(LocalClient):
    """The embedded engine, but what it samples is written down; log-probs are the model's own, so that it can train."""

    script: dict

    def __init__(self, model, tokenizer, **options):
        super().__init__(model, tokenizer, **options)
        self._tokenizer = tokenizer
        self._turns = {}

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        if not session:
            return await super().generate(prompt_ids, sampling_params)
        _, family, index = session.split("/")
        turn = self._turns[session] = self._turns.get(session, -1) + 1
        turns = self.script[family][int(index) % len(self.script[family])]
        tokens = [*self._tokenizer.encode(turns[min(turn, len(turns) - 1)]), self._tokenizer.eos_token_id]
        kept = tokens[: min(sampling_params.max_tokens, self.context_length - len(prompt_ids))]
        logprobs = await self.score([*prompt_ids, *kept])
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        reason = "stop" if len(kept) == len(tokens) else "length"
        return Completion(text, tuple(kept), tuple(logprobs[-len(kept) :]), reason, await self.version())


@pytest.mark.parametrize("name", SUITES)
def test_a_cheating_policy_earns_nothing_and_training_continues(name, model_dir, tmp_path, sweep):
    suite, count = SUITES[name], 2 if sweep else 1
    asked = {
        f"{family}-{start}": (gold, replies[start : start + AT_ONCE])
        for family, (gold, replies) in {**suite.families, "honest": suite.honest}.items()
        for start in range(0, len(replies), AT_ONCE)
    }
    Scripted.script = {family: replies for family, (_, replies) in asked.items()}
    prompt = [{"role": "user", "content": "Write #### and then the answer."}]
    rows = [
        {"prompt_id": family, "messages": prompt, "ground_truth": gold} for family, (gold, _) in asked.items()
    ]
    GRPOTrainer(
        str(model_dir),
        rows,
        rewards=suite.rewards,
        rollout={
            "prompts": len(rows),
            "group_size": AT_ONCE,
            "max_tokens": 300,
        },
        inference={"name": f"{__name__}:Scripted"},
        max_steps=count,
        output={"dir": str(tmp_path)},
        tracking={"episodes_per_step": 0},
        **{f"env.{option}": value for option, value in suite.env.items()},
    ).train()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["failures"]) for row in steps] == [(step + 1, 0.0) for step in range(count)]
    for step in range(count):
        file = tmp_path / "episodes" / f"step-{step + 1:06d}.jsonl"
        episodes = [json.loads(line) for line in file.read_text().splitlines()]
        hacks = [episode for episode in episodes if episode["prompt_id"] != "honest-0"]
        assert [
            (hack["prompt_id"], hack["messages"][-1]["content"]) for hack in hacks if hack["reward"] != 0.0
        ] == []
        assert {hack["prompt_id"] for hack in hacks} == {*asked} - {"honest-0"}
        assert {round(e["reward"], 6) for e in episodes if e["prompt_id"] == "honest-0"} == {suite.worth}
