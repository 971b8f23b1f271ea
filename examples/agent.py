"""An agent that is independent of training: it uses any OpenAI-compatible server, here through the openai SDK.

    rl4llm train configs/agent_grpo.yaml                     # trained as it is: `python examples/agent.py solve` per episode
    python examples/agent.py [--model DIRECTORY] [--steps 30]        # the same function, called inside the trainer

It solves a word problem with a calculator, and forgets every call but the last. Then it has the answer reviewed in a
separate conversation. Each time it drops messages, a new token record begins; all records train.
"""

import json
import os
import re
import sys

import openai

CLIENT = openai.OpenAI(
    base_url="http://127.0.0.1", api_key="none"
)  # its connections serve all episodes of this process
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add, subtract, multiply or divide two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 37+48."}},
            "required": ["expression"],
        },
    },
}


def solve(task: dict, base_url: str, api_key: str) -> str:
    """Return the answer to the task's messages."""
    policy = CLIENT.with_options(base_url=base_url, api_key=api_key, max_retries=0)
    messages, said = task["messages"], None
    for _ in range(3):
        answer = policy.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        said = answer.choices[0].message
        if not said.tool_calls:
            break
        calls = [(call.id, calculate(call.function.arguments)) for call in said.tool_calls]
        results = [{"role": "tool", "tool_call_id": name, "content": result} for name, result in calls]
        messages = [*task["messages"], said.model_dump(exclude_none=True), *results]
    question = f"{task['messages'][-1]['content']}\nSomebody says: {said.content}\nWrite what is right."
    review = policy.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
    return review.choices[0].message.content


def calculate(arguments: str) -> str:
    """Compute what a model wrote. Bad input gives an error as text: a crash would not count as the model's fault."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "Error: an expression is needed."
    found = re.fullmatch(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*", expression)
    if found is None or (found[2] == "/" and int(found[3]) == 0):
        return "Error: two numbers with + - * or / between them."
    one, other = int(found[1]), int(found[3])
    return str(
        {"+": one + other, "-": one - other, "*": one * other}.get(found[2])
        if found[2] != "/"
        else one / other
    )


def train() -> None:
    """Train a policy on its own share of digits; a small one with random weights has no calls to learn from."""
    from shared import arguments, print_progress, prompts

    from rl4llm import BaseRewardFunction, GRPOTrainer
    from rl4llm.extensions.agents.env import AgentEnv

    class Digits(BaseRewardFunction):
        """The share of digits in the agent's output."""

        def __init__(self, name="digits", **kwargs):
            super().__init__(name)

        def __call__(self, messages, ground_truth, **kwargs) -> float:
            said = messages[-1].content
            return sum(letter.isdigit() for letter in said) / max(len(said), 1)

    options = arguments(__doc__)
    GRPOTrainer(
        model=options.model,
        dataset=prompts("How many are 3 and 4?"),
        reward_functions=[Digits()],
        env=AgentEnv,
        max_steps=options.steps,
        rollout={"prompts": 4, "group_size": 8, "max_tokens": 6},
        training={"lr": 3e-3},
        output={"dir": options.output},
        **{"env.agent": "agent:solve", "env.max_steps": 4},
    ).train()
    print_progress(options.output)


if __name__ == "__main__":
    if sys.argv[1:] == ["solve"]:
        print(solve(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
    else:
        train()
