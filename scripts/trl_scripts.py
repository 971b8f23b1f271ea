"""Print which scripts of TRL run unchanged with `rl4llm run`, a row for each; --write puts the table into docs/migration.md.

python scripts/trl_scripts.py --trl DIRECTORY [--only NAME ...] [--write]
python scripts/trl_scripts.py --tests DIRECTORY [--only GRPO ...]

DIRECTORY is a checkout of TRL; the second command prints which of its tests pass, see `trl_tests`. The scripts run in a
directory where the names of models and data sets on the hub are directories with a model of random weights and a few rows,
which `datasets` and rl4llm find before they ask the hub.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import trl_tests

from rl4llm.extensions.trl.run import objections

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
BEGIN, END = "<!-- scripts -->", "<!-- end of scripts -->"
TRAINERS = re.compile(r"\b(?:GRPO|AsyncGRPO|RLOO|SFT|DPO|KTO|Reward)Trainer\b")
LIMIT_S = 600
MODELS = ("tiny", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")
SUM = "What is 1 + 1?"
ASKED, ANSWERED = {"role": "user", "content": SUM}, {"role": "assistant", "content": "It is 2."}
WRONG = {"role": "assistant", "content": "It is 3."}
SYSTEM = {"role": "system", "content": "Be short."}
HUB = {
    "prompts": ({"prompt": [ASKED], "solution": "$2$"}, 16),
    "conversations": ({"messages": [SYSTEM, ASKED, ANSWERED]}, 16),
    "pairs": ({"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]}, 16),
    "labels": ({"prompt": [ASKED], "completion": [ANSWERED], "label": True}, 16),
    "AI-MO/NuminaMath-TIR": ({"problem": SUM, "solution": "$2$", "messages": [ASKED, ANSWERED]}, 640),
    "openai/gsm8k": ({"question": SUM, "answer": "1 + 1 = 2\n#### 2"}, 16),
    "qgallouedec/biogrid": ({"Alt IDs Interactor A": "A", "Alt IDs Interactor B": "B"}, 16),
    "qgallouedec/biogrid_qa": ({"question": "Does the gene A interact with B?", "answer": "Yes"}, 16),
}
"""The columns of data sets, by name: a row, and how often it is repeated."""

SHORT = [
    *("--model_name_or_path", "tiny", "--output_dir", "out", "--max_steps", "1", "--bf16", "False"),
    *("--per_device_train_batch_size", "4"),
]
SAMPLED = [*SHORT, "--num_generations", "2", "--max_completion_length", "8"]
HELD_OUT = ["--eval_strategy", "steps", "--eval_steps", "1"]
LORA = ["--use_peft", "--lora_r", "4"]
CASES: dict[str, list[str]] = {
    "trl/scripts/grpo.py": [*SAMPLED, "--dataset_name", "prompts", "--reward_funcs", "accuracy_reward"],
    "trl/scripts/rloo.py": [*SAMPLED, "--dataset_name", "prompts", "--reward_funcs", "think_format_reward"],
    "trl/scripts/sft.py": [*SHORT, "--dataset_name", "conversations", "--assistant_only_loss", *LORA],
    "trl/scripts/dpo.py": [*SHORT, "--dataset_name", "pairs", *HELD_OUT],
    "trl/scripts/kto.py": [*SHORT, "--dataset_name", "labels"],
    "trl/scripts/reward.py": [*SHORT, "--dataset_name", "pairs"],
    "examples/scripts/grpo_agent.py": SAMPLED,
    "examples/scripts/grpo_continuous_batching.py": [*SAMPLED, *LORA],
    "examples/scripts/gspo.py": [*SAMPLED, "--importance_sampling_level", "sequence", "--loss_type", "grpo"],
    "examples/scripts/kto.py": [*SHORT, "--dataset_name", "labels"],
    "examples/scripts/reward_modeling.py": [*SHORT, "--dataset_name", "pairs", *HELD_OUT],
    "examples/scripts/sft_gpt_oss.py": [*SHORT, "--dataset_name", "conversations"],
    "examples/scripts/sft_nemotron_3.py": [*SHORT, "--dataset_name", "conversations", *LORA],
}
"""The arguments of scripts that read them."""

NO_PUSH = ("examples/scripts/rloo.py",)
"""Scripts that upload at their end whatever their arguments are."""


def make_hub(root: Path) -> None:
    """Write a directory for each model and each data set."""
    from transformers import LlamaForCausalLM

    from rl4llm.backends.tiny import build_model, build_tokenizer, save_model

    texts = [json.dumps(row) for row, _ in HUB.values()] * 8
    tokenizer = build_tokenizer(texts, vocab_size=400)
    model = build_model(tokenizer, seed=0, hidden_size=32, num_layers=2)
    model.config.max_position_embeddings = tokenizer.model_max_length = 1536
    for name in MODELS:
        save_model(LlamaForCausalLM(model.config), tokenizer, root / name)
    for name, (row, count) in HUB.items():
        (root / name).mkdir(parents=True)
        for split in ("train", "test"):
            rows = [row | ({"label": number % 2 == 0} if "label" in row else {}) for number in range(count)]
            (root / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "[{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]"
    (root / "openai/gsm8k/README.md").write_text(
        f"---\nconfigs: [{{config_name: main, data_files: {files}}}]\n---\n"
    )


def scripts(trl: Path) -> Iterator[str]:
    """Yield the scripts that use one of the trainers; pages that only say where a script has moved to have none."""
    found = [*(trl / "trl" / "scripts").glob("*.py"), *(trl / "examples" / "scripts").rglob("*.py")]
    for path in sorted(found):
        if TRAINERS.search(path.read_text()):
            yield path.relative_to(trl).as_posix()


def outcome(trl: Path, name: str) -> tuple[str, str]:
    """Return whether a script runs, and why not; what `rl4llm run` reads in it comes first."""
    refused = next(objections(trl / name, push=name not in NO_PUSH), None)
    if refused is not None:
        return "refused", _cell(refused, trl, name)
    with tempfile.TemporaryDirectory() as directory:
        make_hub(Path(directory))
        return ran(trl, name, Path(directory))


def ran(trl: Path, name: str, hub: Path) -> tuple[str, str]:
    """Run a script; one that would take more than a step is stopped after the first."""
    words = ["--no-push"] if name in NO_PUSH else []
    command = [sys.executable, "-m", "rl4llm", "run", *words, str(trl / name), *CASES.get(name, [])]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub / "cache")}
    with (hub / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=hub, stdout=log, stderr=log, env=os.environ | offline)
        until, asked = time.monotonic() + LIMIT_S, False
        while process.poll() is None:
            time.sleep(0.5)
            if name not in CASES and not asked and _steps(hub):
                process.send_signal(signal.SIGINT)
                asked = True
            if time.monotonic() > until:
                process.kill()
        log.seek(0)
        said = log.read()
    steps = _steps(hub)
    for path in hub.rglob("metrics.jsonl"):
        path.unlink()
    if process.returncode == 0 and steps:
        return "runs" + (" with `--no-push`" if words else ""), ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    refused = next(
        (place for place, line in enumerate(lines) if line.startswith("ConfigError")), len(lines) - 1
    )
    why = _cell(" ".join(lines[refused:]), trl, name)
    kind = "refused" if "ConfigError" in why else f"stops ({process.returncode})"
    return kind, why.removeprefix("ConfigError: ")


def _cell(text: str, trl: Path, name: str) -> str:
    return text.replace(f"{trl / name}:", "line ").replace(str(trl), "").replace("|", "\\|")[:400]


def _steps(hub: Path) -> int:
    return sum(
        '"step"' in line for path in hub.rglob("metrics.jsonl") for line in path.read_text().splitlines()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trl", type=Path, help="a checkout of TRL, whose scripts are run")
    what.add_argument("--tests", type=Path, help="a checkout of TRL, whose tests are run")
    parser.add_argument(
        "--only", nargs="+", help="only scripts whose path contains one of these, or these tests"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/migration.md")
    arguments = parser.parse_args()
    if arguments.tests:
        trl_tests.main(arguments.tests.resolve(), arguments.only)
        return
    trl = arguments.trl.resolve()
    for name in scripts(trl):
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        row = f"| {' | '.join(outcome(trl, name))} |"
        print(f"| {_label(name)} {row}", flush=True)
        if arguments.write:
            write(name, row)


def write(name: str, row: str) -> None:
    """Put the row of a script into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = dict(re.findall(r"^\| (`.+?` in \S+) (.+)$", table, re.MULTILINE)) | {_label(name): row}
    order = sorted(rows, key=lambda label: label.split(" in ")[::-1])
    lines = ["| script | outcome | why |", "|---|---|---|", *(f"| {label} {rows[label]}" for label in order)]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


def _label(name: str) -> str:
    folder, _, file = name.rpartition("/")
    return f"`{file}` in {folder}"


if __name__ == "__main__":
    main()
