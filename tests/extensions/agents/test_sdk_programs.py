"""Small agents of other SDKs, from a directory RL4LLM_SDKS with `python` and `node_modules`; see its `INSTALL`."""

import os
import shutil
from pathlib import Path

import pytest
from sweeps import sampled

from rl4llm.testing import ScriptedClient

PROGRAMS = Path(__file__).with_name("sdks")
PLACE = Path(os.environ.get("RL4LLM_SDKS", "nowhere"))
INSTALL = (
    "python -m venv $RL4LLM_SDKS/python && $RL4LLM_SDKS/python/bin/pip install langchain langchain-openai"
    " langchain-anthropic 'pydantic-ai-slim[openai]' 'smolagents[openai]' llama-index-llms-openai-like litellm"
    " && npm install --prefix $RL4LLM_SDKS ai @ai-sdk/openai @ai-sdk/anthropic @ai-sdk/openai-compatible openai"
    " @anthropic-ai/sdk @openai/agents zod"
)
VARIANTS = [
    "langchain_agent.py chat", "langchain_agent.py chat stream", "langchain_agent.py responses",
    "langchain_agent.py messages", "langchain_agent.py messages stream", "pydantic_agent.py", "llama_index_agent.py",
    "litellm_loop.py chat", "litellm_loop.py messages",
    "ai_sdk.mjs responses", "ai_sdk.mjs responses stream", "ai_sdk.mjs chat", "ai_sdk.mjs compatible stream",
    "ai_sdk.mjs messages", "ai_sdk.mjs messages stream", "openai_run_tools.mjs", "openai_run_tools.mjs stream",
    "anthropic_stream.mjs", "agents_js.mjs", "agents_js.mjs stream",
]  # fmt: skip
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "85"}}</tool_call>'


def command_of(variant, directory):
    """Return the words that run a program in a directory where its packages are found; skip without them."""
    program, *words = variant.split()
    if program.endswith(".py"):
        runs, packages = PLACE / "python" / "bin" / "python", PLACE / "python"
    else:
        runs, packages = Path(shutil.which("node") or "node"), PLACE / "node_modules"
    if not packages.is_dir() or not runs.exists():
        pytest.skip(f"RL4LLM_SDKS has no {packages.name}: {INSTALL}")
    if program.endswith(".mjs"):  # node looks for packages beside the program
        (directory / "node_modules").symlink_to(packages)
    return [str(runs), shutil.copy(PROGRAMS / program, directory), *words]


def episode_of(play, tokenizer, tmp_path, variant, turns, **options):
    client = ScriptedClient(tokenizer, {"": turns})
    result, _ = play(client=client, command=command_of(variant, tmp_path), timeout_s=120, **options)
    (trajectory,) = result.trajectories
    assert not result.failed and trajectory.extras["metrics"]["refused"] == 0
    return trajectory, [tuple(made.prompt_ids) for made in client.calls]


def tokens_of(spans):
    return tuple(token for span in spans for token in span.token_ids)


@pytest.mark.parametrize("variant", sampled(VARIANTS, ["litellm_loop.py chat"]))
def test_an_sdk_plays_a_tool_call_token_for_token(play, tokenizer, tmp_path, variant):
    turns = [f"Let me see.{CALL}", "Answer: 85"]
    trajectory, (one, other) = episode_of(play, tokenizer, tmp_path, variant, turns)
    first, second = (span.token_ids for span in trajectory.policy_spans)
    assert not trajectory.forks and other[: len(one) + len(first)] == one + first
    assert tokens_of(trajectory.spans) == other + second


@pytest.mark.sweep
def test_an_sdk_that_forces_calls_plays_with_the_switch(play, tokenizer, tmp_path):
    options = {"unenforced": ["tool_choice"]}
    trajectory, prompts = episode_of(
        play, tokenizer, tmp_path, "smolagents_agent.py", [CALL, FINAL], **options
    )
    (fork,) = trajectory.forks  # it writes its history anew
    records = [tokens_of(trajectory.spans), tokens_of(fork)]
    assert all(record[: len(prompt)] == prompt for record, prompt in zip(records, prompts, strict=True))
