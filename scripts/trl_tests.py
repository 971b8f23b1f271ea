"""Run TRL's own tests on rl4llm: the table of `scripts/trl_scripts.py --tests`. It is also the pytest plugin that they need.

Names of the hub are directories with tiny models of random weights and a few rows. A test that names anything else of the
hub, or whose marks skip it, is not counted. What rl4llm refuses is refused when a test uses it, not when it imports it.
"""

import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rl4llm.core.errors import ConfigError, RL4LLMError
from rl4llm.extensions.trl import stand_in

FILES = {
    **{name: f"test_{name.lower()}_trainer.py" for name in ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward")},
    "data_utils": "test_data_utils.py",
    "rewards": "test_rewards.py",
}
OUTCOMES = ("passed", "refused by name", "differs", "needs the hub")
RESULTS = "TRL_TESTS_RESULTS"
LIMIT_S = 120
ORG = "trl-internal-testing"
HUB_NAME = re.compile(r"[\"']((?:trl-internal-testing|stanfordnlp|Qwen|openai)/[\w.-]+)")
MODELS = {
    "Qwen2ForCausalLM-2.5": "qwen2",
    "Qwen2ForSequenceClassification-2.5": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3ForSequenceClassification": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM-3.2": "llama",
    "LlamaForSequenceClassification-3.2": "llama",
    "MistralForCausalLM-0.2": "mistral",
    "GptOssForCausalLM": "gpt_oss",
    "GPTNeoXForCausalLM": "gpt_neox",
}
"""The types of models, by name."""

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
SAID = [
    (f"The {thing} is", f" {right}.", f" {wrong}.")
    for thing in ("sky", "sea", "sun", "snow", "grass")
    for right, wrong in (("as it was", "gone"), ("here", "nowhere to be seen"))
]
"""Prompts with a right and a wrong completion."""


def zen() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the rows of each form in which TRL reads a data set."""
    for form in ("standard", "conversational"):
        rows: dict[str, list[dict[str, Any]]] = {}
        for number, texts in enumerate(SAID):
            roles = ("user", "assistant", "assistant")
            messages = [[{"role": role, "content": text}] for role, text in zip(roles, texts, strict=True)]
            prompt, right, wrong = texts if form == "standard" else messages
            label = bool(number % 2)
            for kind, row in {
                "language_modeling": {"text" if form == "standard" else "messages": prompt + right},
                "prompt_only": {"prompt": prompt},
                "prompt_completion": {"prompt": prompt, "completion": right},
                "preference": {"prompt": prompt, "chosen": right, "rejected": wrong},
                "implicit_prompt_preference": {"chosen": prompt + right, "rejected": prompt + wrong},
                "unpaired_preference": {
                    "prompt": prompt,
                    "completion": right if label else wrong,
                    "label": label,
                },
            }.items():
                rows.setdefault(f"{form}_{kind}", []).append(row)
        yield from rows.items()


def make_hub(root: Path) -> None:
    """Write a directory for each model and for the data set `zen`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from rl4llm.backends.tiny import build_tokenizer

    tokenizer = build_tokenizer([" ".join(texts) for texts in SAID], vocab_size=400)
    tokenizer.model_max_length = SIZES["max_position_embeddings"]
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, kind in MODELS.items():
        labels = {} if "CausalLM" in name else {"num_labels": 1}
        config = AutoConfig.for_model(
            kind, **SIZES, **ids, vocab_size=len(tokenizer), bos_token_id=None, **labels
        )
        form = AutoModelForCausalLM if "CausalLM" in name else AutoModelForSequenceClassification
        form.from_config(config).save_pretrained(root / ORG / f"tiny-{name}")
        tokenizer.save_pretrained(root / ORG / f"tiny-{name}")
    (root / ORG / "zen").mkdir()
    configs = []
    for name, rows in zen():
        for split, part in (("train", rows[:-2]), ("test", rows[-2:])):
            path = root / ORG / "zen" / f"{name}-{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
        files = [{"split": split, "path": f"{name}-{split}.jsonl"} for split in ("train", "test")]
        configs.append({"config_name": name, "data_files": files})
    (root / ORG / "zen" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")


def main(trl: Path, only: Sequence[str] | None) -> None:
    """Print a row for each trainer, or only for those named, and the reasons of tests that do not pass."""
    why: Counter[tuple[str, str]] = Counter()
    print(f"| tests | {' | '.join(OUTCOMES)} |\n|---|{'---|' * len(OUTCOMES)}")
    with tempfile.TemporaryDirectory() as directory:
        make_hub(Path(directory))
        for name in only or FILES:
            found = results(trl / "tests" / FILES[name], Path(directory))
            counts = Counter(outcome for _, outcome, _ in found)
            print(f"| {name} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |", flush=True)
            why.update((outcome, reason) for _, outcome, reason in found if reason)
    for (outcome, reason), count in why.most_common():
        print(f"{count:4} {outcome}: {reason}")


def results(file: Path, hub: Path) -> list[list[str]]:
    """Run the tests of a file in a process; return the name, the outcome and the reason of each."""
    path = hub / f"{file.stem}.jsonl"
    words = [
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "trl_tests",
        "--basetemp",
        str(hub / "runs"),
    ]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub / "cache"), RESULTS: str(path), "TQDM_DISABLE": "1"}
    with (hub / "log").open("w+") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *words, str(file)],
            cwd=hub, env=os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=log, stderr=log,
        )  # fmt: skip
        log.seek(0)
        if not path.exists():
            raise SystemExit(log.read()[-4000:])
    return [json.loads(line) for line in path.read_text().splitlines()]


class Refused:
    """A name that rl4llm does not have: using it raises the error."""

    def __init__(self, error: ConfigError):
        self.error = error

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise self.error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error


class _Lenient(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_") and name.endswith("_available"):
            package = name.removeprefix("is_").removesuffix("_available")
            return lambda **_: importlib.util.find_spec(package) is not None
        try:
            return stand_in._Module.__getattr__(self, name)  # type: ignore[arg-type]
        except ConfigError as error:
            return Refused(error)


class _Finder(stand_in._Finder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] == "trl":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Lenient(spec.name)


def pytest_configure() -> None:
    if RESULTS in os.environ:
        sys.meta_path.insert(0, _Finder())


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out tests that need the hub."""
    kept = []
    for item in items:
        text = inspect.getsource(item.function) + repr(
            getattr(item, "callspec", None) and item.callspec.params
        )
        if any(mark.args[:1] != (False,) for mark in item.iter_markers("skipif")) or not all(
            map(os.path.isdir, HUB_NAME.findall(text))
        ):
            _note(item.name, "needs the hub", "")
        elif not any(item.iter_markers("slow")):
            kept.append(item)
    items[:] = kept


@pytest.fixture
def lazy_shared_datadir(request: Any) -> Path:
    return Path(request.fspath).parent / "data"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    yield
    if call.when == "setup":
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(LIMIT_S)
    if call.excinfo is not None:
        error = call.excinfo.value
        skipped = isinstance(error, pytest.skip.Exception)
        known = "refused by name" if isinstance(error, RL4LLMError) else "differs"
        said = re.sub(r"0x\w+|/\S+|\d+", "N", f"{type(error).__name__}: {error}".split("\n")[0])[:160]
        _note(item.name, "needs the hub" if skipped else known, said)
    elif call.when == "call":
        _note(item.name, "passed", "")
    if call.when == "call":
        signal.alarm(0)


def _late(*_: Any) -> None:
    raise TimeoutError(f"more than {LIMIT_S} s")


def _note(name: str, outcome: str, why: str) -> None:
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps([name, outcome, why]) + "\n")
