"""The checks of `gpu.py` that train beside something else: images in the model, a server of the embedded engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from gpu_checks import REWARD
from gpu_probe import ROOT, Probe

from rl4llm.backends.tiny import build_model, build_tokenizer, save_model
from rl4llm.extensions.servers.launch import launch

COLOURS = ROOT / "configs/recipes/colours"
PRECISION = {"float32": ("model.autocast=none",), "autocast": ("model.autocast=bfloat16",)}
SHOWN = (
    "mismatch/mean", "mismatch/max", "mismatch/canary", "staleness", "staleness/max",
    "time/step", "time/rollout", "time/update", "time/publish", "time/verify",
)  # fmt: skip
ASYNC = {  # what each run changes; the first is synchronous
    "taking turns": (), "bound 2": ("rollout.max_staleness=2",),
    "kept cache": ("rollout.max_staleness=2", "inference.keep_cache=true"),
}  # fmt: skip


def images(probe: Probe) -> None:
    """Do the steps of the recipe `colours` run with a frozen and a training image tower, and do both sides agree?"""
    data, steps = probe.work / "colours", 2 if probe.tiny else 12
    with probe.finding("data") as found:
        found["ended"], text = probe.python(COLOURS / "data.py", data, limit=60)
        if found["ended"]:
            found["error"] = text[-400:]
    for tower in ("frozen", "train"):
        for precision, words in PRECISION.items():
            places = (f"model.path={data / 'model'}", f"data.path={data}", f"model.vision={tower}")
            keys = (
                *places,
                *words,
                f"max_steps={steps}",
                "eval.every=0",
                "rollout.prompts=4" if probe.tiny else "rollout.prompts=8",
            )
            _trained(probe, f"{tower}, {precision}", COLOURS / "train.yaml", *keys)


def stream(probe: Probe) -> None:
    """Does a server on the same device play while the trainer computes, and do both sides agree?"""
    tokens = build_tokenizer(["user\nHow many coins are 37 and 48?\nassistant\nAnswer: 85\n"] * 4, 400)
    sizes = {"hidden_size": 32, "num_layers": 2} if probe.tiny else {}
    save_model(build_model(tokens, 0, **sizes), tokens, probe.work / "streamed")
    flags = [str(probe.work / "streamed"), "--port", "0", "model.autocast=none"]
    with launch("embedded", flags, cpu=not probe.cuda) as server:
        for name, words in ASYNC.items():
            if probe.tiny and name != "kept cache":
                continue
            keys = (
                f"model.path={probe.work / 'streamed'}",
                "model.autocast=none",
                "inference.name=embedded",
                f"inference.url={server.url}",
            )
            more = (
                "rollout={prompts: 8, max_tokens: 24}",
                "max_steps=6",
                "eval.every=0",
                "checkpoint.every=0",
            )
            _trained(probe, name, ROOT / "configs/quickstart.yaml", *keys, *more, *words)


def _trained(probe: Probe, name: str, config: Path, *keys: str) -> None:
    """Run `rl4llm train`, and report its last step."""
    began, run = time.monotonic(), probe.work / probe.check / name.replace(", ", "_").replace(" ", "_")
    with probe.finding(name) as found:
        words = (f"model.device={probe.device.type}", f"output.dir={run}", REWARD, *keys)
        code, text = probe.python("-m", "rl4llm", "train", config, *words, limit=probe.limit / 2)
        found["seconds"] = time.monotonic() - began
        file = run / "metrics.jsonl"
        rows: list[dict[str, Any]] = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        steps = [row for row in rows if "time/step" in row]
        if code or not steps:
            found["error"] = f"{code}: {text[-400:]}"
            return
        found |= {name: steps[-1][name] for name in SHOWN if name in steps[-1]}
        found["rewards"] = [round(step["reward/mean"], 3) for step in steps[:: max(1, len(steps) // 6)]]
