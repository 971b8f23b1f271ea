"""The README lists the files that one GRPO step runs through. Here they are counted, and a step is watched."""

import re
import sys
import threading
from pathlib import Path

from rl4llm.api import GRPOTrainer

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rl4llm"
SEAMS = {
    "the engine": ("inference/", "sync/"),
    "the backend and its kernels": ("backends/", "runtime/"),
    "the dataset and the chat template": (
        "data/prompts.py",
        "core/message.py",
        "data/columns.py",
        "data/messages.py",
        "data/load.py",
        "data/probe.py",
        "data/render.py",
        "data/special.py",
        "data/template.py",
        "data/thoughts.py",
        "data/written.py",
    ),
    "the rewards": ("rewards/",),
    "tracking": ("tracking/",),
    "tables and contracts": (
        "core/registry.py",
        "core/tables.py",
        "core/base_algorithm.py",
        "core/base_backend.py",
        "core/base_client.py",
        "core/base_reward.py",
    ),
}
"""Where a step may leave the list: behind each stands a contract, and a reader need not follow."""


def listed():
    """Return the files of the README's list, in its order."""
    section = (
        (ROOT / "README.md").read_text().split("## One step, in the order of reading")[1].split("\n## ")[0]
    )
    return re.findall(r"^\d+\. \[`[^`]+`\]\(rl4llm/([^)]+)\)", section, re.MULTILINE)


def even(completions, **columns):
    """Return a reward that differs within each group."""
    return [float(number % 2) for number, _ in enumerate(completions)]


def files_of_a_step(model_dir, directory, monkeypatch):
    """Return the files of the package whose functions run between the beginning of a step and its end."""
    ask = [[{"role": "user", "content": f"What is {i} + 4?"}] for i in range(4)]
    rows = [{"messages": messages, "ground_truth": ""} for messages in ask]
    trainer = GRPOTrainer(
        str(model_dir),
        rows,
        [even],
        output={"dir": str(directory)},
        rollout={"prompts": 2, "group_size": 2, "max_tokens": 4},
        checkpoint={"every": 0},
        max_steps=1,
    )
    seen = set()

    def watch(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    def between(name, profile):
        method = getattr(type(trainer.trainer), name)

        def watched(self, *args):
            if profile:
                threading.setprofile(watch)
                sys.setprofile(watch)
            result = method(self, *args)
            if not profile:
                sys.setprofile(None)
                threading.setprofile(None)
            return result

        monkeypatch.setattr(type(trainer.trainer), name, watched)

    async def profile_the_loop():
        sys.setprofile(watch)

    trainer.trainer.inference.runner.run(profile_the_loop())
    between("collect", True)
    between("report", False)
    trainer.train()
    return seen


def test_one_step_is_at_most_15_files_and_3740_lines():
    files = listed()
    lines = sum(len((PACKAGE / file).read_text().splitlines()) for file in files)
    assert len(set(files)) == len(files) <= 15
    assert lines <= 3740


def test_a_step_runs_only_through_the_listed_files(model_dir, tmp_path, monkeypatch):
    seen = files_of_a_step(model_dir, tmp_path / "run", monkeypatch)
    spine = set(listed())
    behind = tuple(prefix for prefixes in SEAMS.values() for prefix in prefixes)
    assert not sorted(file for file in seen - spine if not file.startswith(behind))
    assert not sorted(spine - seen)  # the list names nothing that a step does not enter
