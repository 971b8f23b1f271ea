"""Real agents with the configurations of `configs/agents/`; a directory of RL4LLM_AGENTS, or PATH, has their programs."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rl4llm.cli import main
from rl4llm.testing import ScriptedClient

CONFIGS = Path(__file__).parents[3] / "configs"
PATH = os.pathsep.join(filter(None, (os.environ.get("RL4LLM_AGENTS"), os.environ["PATH"])))
PROGRAMS = {
    "claude_code": ("claude", "npm install @anthropic-ai/claude-code@2.1.197"),
    "codex": ("codex", "npm install @openai/codex@0.171.0"),
    "opencode": ("opencode", "npm install opencode-ai@1.18.33"),
    "mini_swe_agent": ("mini", "pip install mini-swe-agent==2.4.6"),
    "openai_agents": ("python3", "pip install openai-agents==0.24.0"),
}
"""The program of each configuration, and how the version that was tried is installed."""
TOOLS = {
    "claude_code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "opencode": ("bash", "command"),
    "mini_swe_agent": ("bash", "command"),
    "openai_agents": ("shell", "command"),
}
ENDS = {"mini_swe_agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo Answer: 85"}
PROMPT = "--How many are \"37\" + '48' in $HOME?"
WHOLE = "print(Runner.run_sync(agent, sys.argv[1], max_turns=1000).final_output)"
STREAMED = """
    import asyncio
    async def main():
        run = Runner.run_streamed(agent, sys.argv[1], max_turns=1000)
        [event async for event in run.stream_events()]
        print(run.final_output)
    asyncio.run(main())
"""


def version_of(name):
    program, install = PROGRAMS[name]
    words = [shutil.which(program, path=PATH), "--version"]
    if install.startswith("pip"):
        package = install.split()[-1].partition("==")[0]
        beside = Path(words[0] or "").parent / "python"
        words = [str(beside), "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout if words[0] else ""


@pytest.fixture
def options(tmp_path, monkeypatch):
    """The options of an installed agent; its test is skipped where another version, or none, is installed."""

    def read(name):
        tried = PROGRAMS[name][1]
        monkeypatch.setenv("HOME", str(tmp_path))
        if tried.replace("==", "@").rpartition("@")[2] not in (version := version_of(name)):
            pytest.skip(f"{version or 'nothing'} is installed; tried was `{tried}`")
        monkeypatch.setenv("PATH", PATH)
        chosen = yaml.safe_load((CONFIGS / "agents" / f"{name}.yaml").read_text())["env"]
        return chosen | {"env": {**chosen.get("env", {}), "PATH": PATH}}

    return read


def call(name, command):
    tool, argument = TOOLS[name]
    text = json.dumps({"name": tool, "arguments": {argument: command, "description": "x"}})
    return f"Let me see.<tool_call>{text}</tool_call>"


def check_episode(play, tokenizer, name, options):
    last = call(name, ENDS[name]) if name in ENDS else "Answer: 85"
    turns = [call(name, "echo $(expr 37 + 48) > made && cat made"), last]
    client = ScriptedClient(tokenizer, {"": turns}, context_length=400_000)
    columns = {"messages": [{"role": "user", "content": PROMPT}]}
    result, _ = play(client=client, columns=columns, timeout_s=120, **options)
    (trajectory,) = result.trajectories
    assert not result.failed and trajectory.extras["metrics"]["refused"] == 0 and not trajectory.forks
    one, other = (tuple(made.prompt_ids) for made in client.calls)
    first, second = (span.token_ids for span in trajectory.policy_spans)
    whole = tuple(token for span in trajectory.spans for token in span.token_ids)
    assert other[: len(one) + len(first)] == one + first and whole == other + second
    roles = [message.role for message in trajectory.messages]
    texts = {role: text.content for role, text in zip(roles, trajectory.messages, strict=True)}
    assert PROMPT in texts["user"] and "85" in texts["tool"] and "85" in texts["assistant"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_real_agent_plays_a_tool_call_token_for_token(play, tokenizer, options, name):
    check_episode(play, tokenizer, name, options(name))


def test_a_real_agent_that_streams_plays_the_same(play, tokenizer, options):
    chosen = options("openai_agents")
    text = chosen["files"][".agent.py"]
    assert text.count(WHOLE) == 1
    check_episode(
        play,
        tokenizer,
        "openai_agents",
        chosen | {"files": {".agent.py": text.replace(WHOLE, STREAMED.strip())}},
    )


@pytest.mark.parametrize("name", ["mini_swe_agent", "openai_agents"])
def test_a_real_agent_trains_two_steps(options, model_dir, tmp_path, capsys, name):
    options(name)
    model = shutil.copytree(model_dir, tmp_path / "model")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 8192}))
    small = [
        "rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=12", "model.autocast=none", "max_steps=2",
        "data.limit=4", "tracking.tensorboard=false", "checkpoint.every=0", "eval.every=0", "training.lr=1.0e-3",
        "rewards=[{name: length, unit: chars, max_length: 1, margin: 10}]", "env.max_steps=3",
        "algorithm.entropy_coef=1.0e-6",
    ]  # fmt: skip
    files = [str(CONFIGS / "agent_grpo.yaml"), str(CONFIGS / "agents" / f"{name}.yaml")]
    run = tmp_path / "run"
    assert main(["train", *files, *small, f"model.path={model}", f"output.dir={run}"]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "trajectories" in row]
    assert len(rows) == 2 and all(row["trajectories"] == 2 and row["mismatch/max"] < 1e-4 for row in rows)
    assert all(row["env/trained_tokens"] == row["env/generated_tokens"] > 0 for row in rows)
