"""The smallest run that trains: the same file for every launcher, and what came of it.

small = SmallRun.at(tmp_path, model_dir)
subprocess.run(["torchrun", "-m", "rl4llm", "train", *small.into("torchrun")])
small.weights("torchrun")
"""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

CONFIG = {
    "model": {"autocast": "none"},  # the same numbers on every processor
    "data": {"path": "arithmetic", "limit": 8},
    "eval": {"every": 0},
    "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 10}],
    "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 4},
    "training": {"lr": 1.0e-3},
    "tracking": {"tensorboard": False, "episodes_every": 0},
    "checkpoint": {"every": 5},
    "deterministic": True,
    "max_steps": 2,
    "timeout_s": 60,
}


@dataclass(frozen=True, slots=True)
class SmallRun:
    """Train one configuration several times, each in a separate directory."""

    directory: Path

    @classmethod
    def at(cls, directory, model_dir):
        (directory / "small.yaml").write_text(
            yaml.safe_dump(CONFIG | {"model": CONFIG["model"] | {"path": str(model_dir)}})
        )
        return cls(directory)

    def into(self, name, *overrides):
        """Return the arguments of `rl4llm train`."""
        return [str(self.directory / "small.yaml"), f"output.dir={self.directory / name}", *overrides]

    def steps(self, name):
        """Return how many steps are done."""
        file = self.directory / name / "metrics.jsonl"
        return (
            max((json.loads(line)["step"] for line in file.read_text().splitlines()), default=0)
            if file.exists()
            else 0
        )

    def weights(self, name):
        """Return the bytes of the model that a run wrote at its end."""
        return (self.directory / name / "model" / "model.safetensors").read_bytes()
