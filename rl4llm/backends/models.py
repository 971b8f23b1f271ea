"""Models and tokenizers from disk or the hub, ready to train: errors that say what to do, no dropout, fast kernels."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from rl4llm.backends.heads import VALUE_HEAD_FILE, ValueHead
from rl4llm.core.errors import ModelError, unknown
from rl4llm.core.hub import hub_answers
from rl4llm.core.kernels import use_fast_linear, use_fast_norms
from rl4llm.core.ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, HFValidationError)
"""What transformers raises for files that are missing, damaged or do not belong together."""


def load_model(
    path_or_model: str | Path | PreTrainedModel,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    attn_implementation: str | None = None,
    shared_by: Ranks | None = None,
) -> PreTrainedModel:
    """A causal language model in evaluation mode, every dropout off; raises ModelError when there is none to be had.

    Log-probs must equal those of the engine that sampled, so dropout never runs, whatever the model's config says. A
    model that is given as an object is used as it is, moved and converted in place.

    Of ranks that will share its weights out, `shared_by`, only the first one reads them: on all of them the model stays
    in the memory of the CPU, and on the others nothing was written yet to that of its matrices, which so takes no room.
    """
    dtype = _dtype(dtype)
    if isinstance(path_or_model, PreTrainedModel):
        model = path_or_model.to(dtype)
    elif shared_by is None:
        model = _from_files(str(model_directory(path_or_model)), dtype, attn_implementation)
    else:
        model = _from_first(str(model_directory(path_or_model)), dtype, attn_implementation, shared_by)
    without_dropout(model)
    model.to(torch.device(device if shared_by is None else "cpu")).eval()
    if torch.device(device).type == "cpu":
        use_fast_linear(model)
        use_fast_norms(model)
    if gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(
                f"model.gradient_checkpointing=true is not accepted: {type(model).__name__} does not support it. "
                "Leave it out, or lower training.max_tokens_per_batch to save memory."
            )
        with warnings.catch_warnings():  # its new name does not exist in every version that is supported
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers checkpoints only in training mode, which is the same without dropout
    return model


def empty_model(
    path: str | Path, dtype: str | torch.dtype = "float32", attn_implementation: str | None = None
) -> PreTrainedModel:
    """A model's architecture on the meta device, from its config alone: names, shapes and dtypes, but no numbers.

    Raises ModelError when there is no model to be had.
    """
    path = str(model_directory(path))
    _check_directory(path)
    if Path(path).is_dir():
        _check_model_files(Path(path))
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path, **_from(path)),
                dtype=_dtype(dtype),
                attn_implementation=attn_implementation,
            )
    except UNREADABLE as error:
        raise ModelError(_unreadable("config of the model", path, error)) from error


def model_directory(path: str | Path) -> str | Path:
    """Where a model lies: for the directory of a finished run its `model/`, for anything else the path itself."""
    if not (Path(path) / "run.json").is_file():
        return path
    if not (Path(path) / "model").is_dir():
        raise ModelError(f"model.path={str(path)!r} is a run that is not done: it has no model/ yet. Let it finish first.")
    return Path(path) / "model"


def load_value_head(path: str | Path | None, model: PreTrainedModel) -> ValueHead:
    """The value head that was exported beside a model, or a new one; raises ModelError when it is another model's."""
    head = ValueHead(model.config.get_text_config().hidden_size)
    file = Path(model_directory(path or "")) / VALUE_HEAD_FILE
    if file.is_file():
        try:
            head.load_state_dict(load_file(file))
        except (RuntimeError, SafetensorError) as error:
            raise ModelError(f"{file} is not the value head of this model: {error}") from error
    return head.to(next(model.parameters()).device)


def load_tokenizer(path: str | Path, pad_token: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name; `pad_token` names one of its tokens where it has none of its own.

    Raises ModelError when there is no tokenizer, or none with a pad token.
    """
    path = str(model_directory(path))
    _check_directory(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **_from(path))
        if _cuts_otherwise(tokenizer, Path(path)):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except UNREADABLE as error:
        raise ModelError(_unreadable("tokenizer", path, error)) from error
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ModelError(f"model.pad_token={pad_token!r} is no token of {path!r}. {_candidates(tokenizer)}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        raise ModelError(
            f"The tokenizer in {path!r} has no pad token, which rows of unequal length need. Set model.pad_token to one of "
            f"its tokens that no text contains. {_candidates(tokenizer)}"
        )
    return tokenizer


def _cuts_otherwise(tokenizer: PreTrainedTokenizerBase, directory: Path) -> bool:
    """Whether transformers put another tokenizer in the place of the one in the files.

    It chooses a class by the model's type, and that class may bring its own rules for cutting text into words: a tokenizer
    trained with other rules beside a Qwen2 model would then give other tokens than those it was saved with.
    """
    file = directory / "tokenizer.json"
    if not file.is_file() or not tokenizer.is_fast:
        return False
    stored, loaded = (json.loads(text) for text in (file.read_text(encoding="utf-8"), tokenizer.backend_tokenizer.to_str()))
    return any(stored.get(part) != loaded.get(part) for part in ("normalizer", "pre_tokenizer"))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws none while it reads or writes."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def without_dropout(model: nn.Module) -> list[str]:
    """Switch every dropout of a model off, in its modules and its config; returns what was on."""
    silenced = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            silenced.append(name)
            module.p = 0.0
        for attribute, rate in list(vars(module).items()):
            if _is_dropout(attribute, rate):
                silenced.append(f"{name}.{attribute}")
                setattr(module, attribute, 0.0)
    config = getattr(model, "config", None)
    for attribute, rate in list(vars(config).items()) if config is not None else ():
        if _is_dropout(attribute, rate):
            setattr(config, attribute, 0.0)
    return silenced


def _is_dropout(attribute: str, value: Any) -> bool:
    return isinstance(value, float) and value > 0 and attribute.endswith(("dropout", "pdrop"))


def _from_files(path: str, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    _check_directory(path)
    if Path(path).is_dir():
        _check_model_files(Path(path))
    try:
        with without_progress_bars():
            config = AutoConfig.from_pretrained(path, **_from(path))
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                output_loading_info=True,
                **_from(path),
            )
    except UNREADABLE as error:
        raise ModelError(_unreadable("model", path, error)) from error
    _check_complete(path, report)
    return model


def _from_first(path: str, dtype: torch.dtype, attn_implementation: str | None, ranks: Ranks) -> PreTrainedModel:
    """The model on the first rank; on the others the same with its norms, biases and buffers, but not its matrices."""
    model = problem = None
    try:
        read = _from_files if ranks.is_first else _hollow
        model = read(path, dtype, attn_implementation)
    except ModelError as error:
        problem = error
    failed = ranks.largest(int(problem is not None))
    if problem is not None:
        raise problem
    if model is None or failed:
        raise ModelError(f"Another rank could not load model.path={path!r}; its own message says why.")
    small = (parameter for parameter in model.parameters() if parameter.dim() < 2)
    for tensor in (*model.buffers(), *small):
        ranks.spread(tensor)
    return model


def _hollow(path: str, dtype: torch.dtype, attn_implementation: str | None) -> PreTrainedModel:
    """A model whose memory nothing was written to."""
    model = empty_model(path, dtype, attn_implementation).to_empty(device="cpu")
    model.tie_weights()
    return model


def _check_complete(path: str, report: dict[str, Any]) -> None:
    """transformers fills tensors that a checkpoint lacks with random numbers; training on those is a bug without a sign."""
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            raise ModelError(
                f"The weights in {path!r} do not fit its config.json: {kind.replace('_', ' ')} {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}. Copy the directory again from its source."
            )


def _from(path: str) -> dict[str, bool]:
    """Whether transformers may ask the hub: of a directory it need not, and without a network only its cache can help."""
    return {"local_files_only": Path(path).is_dir() or not hub_answers()}


def _check_directory(path: str) -> None:
    """Something that looks like a path must be a directory; anything else may be a hub name."""
    here = Path(path)
    if here.is_dir() or (not here.exists() and path.count("/") <= 1 and not path.startswith((".", "/", "~"))):
        return
    what = "is a file" if here.exists() else "does not exist"
    raise ModelError(
        f"model.path={path!r} {what}. Accepted: a Hugging Face model directory (config.json, *.safetensors, tokenizer "
        "files) or a name on the hub such as 'Qwen/Qwen2.5-0.5B-Instruct'."
    )


def _check_model_files(directory: Path) -> None:
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(
            f"model.path={str(directory)!r} has no config.json, so it is no Hugging Face model directory. Accepted: what "
            "`save_pretrained` wrote."
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{config} is not valid JSON: {error}. Copy the directory again from its source.") from error


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(unknown("model.dtype", dtype, DTYPES))
    return DTYPES[dtype]


def _unreadable(what: str, path: str, error: BaseException) -> str:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    if Path(path).is_dir():
        step = "Check that all files are there and whole; copying the directory again from its source helps most often."
    else:
        step = "It is no directory here, and the hub did not give it. Check the name and the network, or use a local copy."
    return f"The {what} model.path={path!r} cannot be loaded: {reason[0][:300]} {step}"


def _candidates(tokenizer: PreTrainedTokenizerBase) -> str:
    special = [token for token in tokenizer.all_special_tokens if isinstance(token, str)]
    return f"Its special tokens: {', '.join(map(repr, special)) or 'none'}."
