"""Training with tools: the configuration runs end to end with every tool that is there."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from rl4llm.cli import main

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic_tool_dapo.yaml"
THINGS = Path(__file__).parents[1] / "extensions" / "toolbox" / "things_server.py"
SMALL = [
    "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "model.autocast=none", "max_steps=2",
    "tracking.tensorboard=false", "checkpoint.every=0", "eval.every=0", "env.describe_tools=false", "algorithm.name=grpo",
]  # fmt: skip


@pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed; scripts/install_sandbox.sh does it"
)
def test_the_tool_configuration_trains_with_every_tool(model_dir, tmp_path, capsys):
    pytest.importorskip("mcp")
    pytest.importorskip("bm25s")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "sums.md").write_text("37 and 48 are 85.")
    tools = [
        "calculator",
        "python",
        "workspace",
        f"{{name: search, corpus: {tmp_path / 'corpus'}}}",
        f"{{name: mcp, command: [{sys.executable}, {THINGS}]}}",
    ]
    arguments = [
        *SMALL,
        f"model.path={model_dir}",
        f"output.dir={tmp_path / 'run'}",
        f"env.tools=[{', '.join(tools)}]",
    ]
    assert main(["train", str(CONFIG), *arguments]) == 0
    assert "sandbox prefork: contains network, host_files" in capsys.readouterr().out
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["trajectories"] for row in metrics if "trajectories" in row] == [4.0, 4.0]
