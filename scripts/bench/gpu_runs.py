"""The checks of `gpu.py` that run `rl4llm train`: the quickstart, images in the model, a server of the embedded engine."""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from gpu_probe import ROOT, Probe

from rl4llm.backends.tiny import build_model, build_tokenizer, save_model
from rl4llm.extensions.servers.launch import launch

COLOURS = ROOT / "configs/recipes/colours"
SHOWN = ("mismatch/", "staleness", "time/")
SAME = ("deterministic=true", "max_steps=4")
RUNS = {  # what each run changes in the quickstart
    "whole": SAME, "twice": SAME, "cut": (*SAME, "max_steps=2"), "fast": (*SAME, "inference.path=fast"),
    "autocast": ("model.autocast=auto", "max_steps=3"), "bf16": ("model.dtype=bfloat16", "max_steps=2"),
    "lora": ("model.lora.rank=8", "max_steps=2"), "ppo": ("max_steps=2", "algorithm.critic_warmup_steps=1"),
}  # fmt: skip
SMALL = ("rollout={prompts: 4, max_tokens: 8}", "env.max_steps=2", "eval.every=0", "checkpoint.every=2")
ASYNC = {  # what each run changes; the first is synchronous
    "taking turns": (), "bound 2": ("rollout.max_staleness=2",),
    "kept cache": ("rollout.max_staleness=2", "inference.keep_cache=true"),
}  # fmt: skip
# This reward differs between nearly all answers of a model that has learned nothing.
REWARD = "rewards=[{name: length, unit: chars, min_length: 1000, max_length: 2000, margin: 1000}]"


def train(probe: Probe) -> None:
    """Do runs of the command line end, and do deterministic ones give equal weights, resumed too?"""
    place = f"model.path={_model(probe)}"

    def weights_of(name: str) -> str:
        changed = RUNS[name.removesuffix(", resumed")] if "," not in name else SAME
        config = ROOT / f"configs/quickstart{'_ppo' if name == 'ppo' else ''}.yaml"
        return _trained(probe, name, config, place, *SMALL, *changed)

    if probe.tiny:
        weights_of("cut")
        return
    with ThreadPoolExecutor(4) as pool:
        weights = dict(zip(RUNS, pool.map(weights_of, RUNS), strict=True))
    weights["resumed"] = weights_of("cut, resumed")
    with probe.finding("weights equal those of the whole run") as found:
        found |= {name: weights[name] == weights["whole"] for name in ("twice", "resumed", "fast")}


def learn(probe: Probe) -> None:
    """How does the quickstart learn, as far as the time goes?"""
    configs, place = probe.work / "configs", probe.work / "quickstart"
    configs.mkdir()
    for name, group, every in (("quickstart_warmup.yaml", 1, 0), ("quickstart.yaml", 2, 1)):
        config = yaml.safe_load((ROOT / "configs" / name).read_text())
        if probe.tiny:
            config |= {"max_steps": 1, "checkpoint": {"every": 1}, "eval": {"limit": 2, "every": every}}
            config["rollout"] = {"prompts": 4, "group_size": group, "max_tokens": 8}
        (configs / name).write_text(yaml.safe_dump(config))
    with probe.finding("quickstart") as found:
        words = ("-m", "rl4llm", "recipe", "quickstart", "--dir", place, "--configs", configs)
        code, text = probe.python(*words, limit=probe.limit - 30)
        evals, steps = (_lines(place / "grpo" / f"{name}.jsonl") for name in ("eval", "metrics"))
        found |= {"ended": code, "curve": [(row["step"], round(row["accuracy"], 3)) for row in evals]}
        found |= (
            {name: value for name, value in steps[-1].items() if name.startswith(("step", *SHOWN))}
            if steps
            else {}
        )
        if code not in (0, "stopped"):
            found["error"] = f"{code}: {text[-400:]}"


def images(probe: Probe) -> None:
    """Do the steps of the recipe `colours` run with a frozen and a training image tower, and do both sides agree?"""
    data = probe.work / "colours"
    with probe.finding("data") as found:
        found["ended"], text = probe.python(COLOURS / "data.py", data, limit=60)
        if found["ended"]:
            found["error"] = text[-400:]
    places = (f"model.path={data / 'model'}", f"data.path={data}", "eval.every=0")
    size = ("max_steps=2", "rollout.prompts=4") if probe.tiny else ("max_steps=12", "rollout.prompts=8")
    for tower in ("frozen", "train"):
        for precision in ("none", "bfloat16"):
            keys = (f"model.vision={tower}", f"model.autocast={precision}")
            _trained(probe, f"{tower}, autocast={precision}", COLOURS / "train.yaml", *places, *size, *keys)


def stream(probe: Probe) -> None:
    """Does a server on the same device play while the trainer computes, and do both sides agree?"""
    model = _model(probe)
    size = ("rollout={prompts: 8, max_tokens: 24}", "max_steps=6", "eval.every=0", "checkpoint.every=0")
    with launch("embedded", [str(model), "--port", "0", "model.autocast=none"], cpu=not probe.cuda) as server:
        served = (
            f"model.path={model}",
            "model.autocast=none",
            "inference.name=embedded",
            f"inference.url={server.url}",
        )
        for name, words in list(ASYNC.items())[2 if probe.tiny else 0 :]:
            _trained(probe, name, ROOT / "configs/quickstart.yaml", *served, *size, *words)


def _model(probe: Probe) -> Path:
    """Save the model of the quickstart, with random weights."""
    tokens = build_tokenizer(["user\nHow many coins are 37 and 48?\nassistant\nAnswer: 85\n"] * 4, 400)
    sizes = {"hidden_size": 32, "num_layers": 2} if probe.tiny else {}
    save_model(build_model(tokens, 0, **sizes), tokens, probe.work / "model")
    return probe.work / "model"


def _trained(probe: Probe, name: str, config: Path, *keys: str) -> str:
    """Run `rl4llm train`, report its last step, and return a hash of the weights."""
    run, began = (
        probe.work / probe.check / name.removesuffix(", resumed").replace(", ", "_"),
        time.monotonic(),
    )
    with probe.finding(name) as found:
        words = (f"model.device={probe.device.type}", f"output.dir={run}", REWARD, *keys)
        code, text = probe.python("-m", "rl4llm", "train", config, *words, limit=probe.limit / 2)
        found["seconds"] = time.monotonic() - began
        files = sorted(run.glob("model/*.safetensors"))
        found["weights"] = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
        steps = [row for row in _lines(run / "metrics.jsonl") if "time/step" in row]
        if code or not files or not steps:
            found["error"] = f"{code}: {text[-400:]}"
        else:
            found |= {name: value for name, value in steps[-1].items() if name.startswith(SHOWN)}
            found["rewards"] = [round(step["reward/mean"], 3) for step in steps[:: max(1, len(steps) // 6)]]
    return found["weights"]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
