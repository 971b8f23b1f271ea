"""Generated conversations that use the calculator: first clean ones, then ones by a sloppy teacher.

After a warm-up on clean demonstrations only, the model would have nothing left to learn; after sloppy ones only, it
could not use the tool at all. Clean first and sloppy last gives a policy that can use the tool, but mostly does not.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rl4llm.extensions.quickstart.arithmetic import SYSTEM, Calculation, problems

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Mix:
    """The number of demonstrations, and the share of each flaw among the sloppy ones."""

    clean: int = 14400
    sloppy: int = 4800
    guesses: float = 0.55  # answers at once, and wrong
    stops_early: float = 0.10  # leaves out the second step
    miscopies: float = 0.05  # types a wrong number


def demonstrations(seed: int, mix: Mix | None = None) -> Iterator[dict[str, object]]:
    """Yield rows with `messages`; problems come from the training split only, and each occurs once."""
    mix = mix or Mix()
    stream = problems("train", seed + 1)
    for number, (problem, choose) in enumerate(itertools.islice(stream, mix.clean + mix.sloppy)):
        flaw = _flaw(choose, mix) if number >= mix.clean else None
        question = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": problem.question(choose)},
        ]
        yield {
            "prompt_id": f"demonstration-{number}",
            "messages": [*question, *_turns(problem, flaw, choose)],
            "ground_truth": str(problem.answer),
        }


def _flaw(choose: random.Random, mix: Mix) -> str | None:
    """Choose what is wrong with a demonstration; None for a correct one."""
    names = ("guess", "stop early", "miscopy")
    shares = (mix.guesses, mix.stops_early, mix.miscopies)
    return choose.choices((*names, None), (*shares, 1 - sum(shares)))[0]


def _turns(problem: Calculation, flaw: str | None, choose: random.Random) -> list[Message]:
    if flaw == "guess":
        return [_answer(problem.answer + choose.choice((-1, 1)) * choose.randint(1, 30))]
    turns: list[Message] = []
    steps = problem.steps[:1] if flaw == "stop early" else problem.steps
    for expression, result in steps:
        if flaw == "miscopy":
            at = choose.choice([i for i, letter in enumerate(expression) if letter.isdigit()])
            typo = expression[:at] + choose.choice("123456789") + expression[at + 1 :]
            turns += [_call(typo), _result(result + choose.randint(1, 9))]
            return [*turns, _answer(result)]
        turns += [_call(expression), _result(result)]
    return [*turns, _answer(steps[-1][1])]


def _call(expression: str) -> Message:
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}


def _result(value: int) -> Message:
    return {"role": "tool", "content": str(value)}


def _answer(value: int) -> Message:
    return {"role": "assistant", "content": f"Answer: {value}"}
