"""Load models and tokenizers from disk or the hub, ready to train: no dropout, fast kernels, errors with a next step."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from rl4llm.backends.checkpoint_names import CheckpointNames
from rl4llm.backends.model_files import (
    ATTRIBUTE,
    check_kind,
    is_around_text,
    is_scored,
    model_directory,
    refuse_adapted,
    without_reports,
)
from rl4llm.backends.positions import scale_by_position
from rl4llm.core.errors import ModelError
from rl4llm.core.registry import load
from rl4llm.core.weights import TensorSpec
from rl4llm.runtime import devices
from rl4llm.runtime.cpu import use_fast_linear, use_fast_norms
from rl4llm.runtime.hub import hub_answers
from rl4llm.runtime.quantized import dequantize, nf4, quantize, quantized_weights, take_quantized
from rl4llm.runtime.ranks import Ranks

if TYPE_CHECKING:
    from rl4llm.backends.vision_language import WholeCheckpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOVED_TOKENS = 0.01  # of a model's tokens, which a tokenizer that was made for it may have renamed
UNREADABLE = (
    ArithmeticError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError,
    HFValidationError, SafetensorError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises for files that are missing, damaged or inconsistent."""
_COMPUTED = re.compile(
    r"att(n|ention)\.(masked_)?bias$|causal_mask$|inv_freq$|(cos|sin)_cached$|version$|\bmtp"
)
"""What files of older models hold beside weights, such as masks, and layers that predict several tokens."""


def load_model(
    path_or_model: str | Path | PreTrainedModel,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    gradient_checkpointing: bool = False,
    shared_by: Ranks | None = None,
    *,
    values: bool = False,
    nf4_skips: Sequence[str] | None = None,
    packed: bool = True,
) -> PreTrainedModel:
    """Return a causal language model in evaluation mode without dropout; raise ModelError when it cannot be loaded.

    Log-probs must equal those of the engine that sampled, so dropout never runs, whatever the model's config says. A
    model object is used directly, moved and converted in place. The device "auto" is a GPU if there is one. Use
    "cpu" or `shared_by` for a backend that shards, since the whole model may not fit a GPU. With `values` a classifier is
    read without its score, see `load_value_head`.

    With `nf4_skips`, even empty, linear layers other than these come to the device in 4 bits, one at a time. What is not
    `packed` are the weights of such a model as ordinary parameters, which can take others.

    When the ranks `shared_by` will shard the weights, only the first rank reads them. On all ranks the model stays in CPU
    memory; on the others the memory of its matrices is untouched, so it takes no space."""
    dtype = _dtype(dtype)
    refuse_adapted(path_or_model)
    if device == "auto":
        device = devices.default()
    if isinstance(path_or_model, PreTrainedModel):
        model = path_or_model
        take_quantized(model, dtype)
        model.to(dtype)
        if nf4_skips is not None:
            quantize(model, nf4_skips, device)
        check_finite(model, model.name_or_path or type(model).__name__)
    elif shared_by is None:
        model = _from_files(path_or_model, dtype, values, nf4_skips, device)
    else:
        model = _from_first(str(model_directory(path_or_model)), dtype, values, shared_by)
    if not packed:
        dequantize(model)
    without_dropout(model)
    model.to(torch.device(device if shared_by is None else "cpu")).eval()
    if torch.device(device).type == "cpu":
        use_fast_linear(model)
    use_fast_norms(model)
    scale_by_position(model)
    if gradient_checkpointing:
        _checkpoint(model)
    return model


def _checkpoint(model: PreTrainedModel) -> None:
    """Have the layers of a model keep only their inputs for the backward pass; raise ModelError where they cannot.

    transformers checkpoints layers in training mode. All modules inside them stay in evaluation mode, since a router adds
    noise in the other one. The model is marked as training, so that its engine looks for such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers):
        raise ModelError(
            f"model.gradient_checkpointing=true is not accepted: {type(model).__name__} does not support it. "
            "Remove it, or lower training.max_tokens_per_batch to save memory."
        )
    with warnings.catch_warnings():  # its new name does not exist in every version that is supported
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in (model, *layers):
        module.training = True


def empty_model(path: str | Path, dtype: str | torch.dtype = "float32") -> PreTrainedModel:
    """Return a model's architecture on the meta device from its config alone: names, shapes and dtypes, but no numbers.

    Raise ModelError when the config cannot be read.
    """
    path = str(model_directory(path))
    config, whole = _configs(path)
    with _reading("config of the model", path), torch.device("meta"):
        return AutoModelForCausalLM.from_config(whole.text_config if whole else config, dtype=_dtype(dtype))


def load_tokenizer(path: str | Path, pad_token: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model directory or hub name; `pad_token` names one of its tokens as the pad token.

    Raise ModelError when there is no tokenizer, or it has no pad token.
    """
    tokenizer = stored_tokenizer(path)
    pad_token = pad_token or tokenizer.pad_token
    if pad_token not in tokenizer.get_vocab():
        raise ModelError(
            f"The tokenizer in {path!r} has no pad token {pad_token or ''}. Set model.pad_token to one of its tokens that "
            f"never occurs in text, such as one of {tokenizer.all_special_tokens}."
        )
    tokenizer.pad_token = pad_token
    return tokenizer


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model: str | Path | PreTrainedModel, *, given: bool
) -> None:
    """Raise ModelError for a tokenizer whose vocabulary is not the model's.

    The model may have embeddings for more tokens than the tokenizer has. A tokenizer that was `given` as an object is
    compared with the one in the model's directory too; most of their tokens must have the same number.
    """
    name, size = _vocabulary_of(model)
    path = tokenizer.name_or_path or "given"
    vocabulary = tokenizer.get_vocab()
    step = "Use the tokenizer that was saved with the model, or resize the model's embeddings."
    highest = max((vocabulary[token] for token in _of_text(tokenizer, vocabulary)), default=-1)
    if size is not None and highest >= size:
        raise ModelError(
            f"The tokenizer {path!r} does not match the model {name!r}: its token ids go up to {highest:,}, but the "
            f"model has embeddings for {size:,} tokens. {step}"
        )
    if not given or name == tokenizer.name_or_path:
        return
    stored = _stored_vocabulary(name)
    moved = [token for token, number in stored.items() if vocabulary.get(token) != number]
    if len(moved) > MOVED_TOKENS * len(stored):
        raise ModelError(
            f"The tokenizer {path!r} does not match the model {name!r}: {len(moved):,} of its {len(stored):,} tokens "
            f"have another id or are missing, such as {moved[0]!r} ({stored[moved[0]]} there, "
            f"{vocabulary.get(moved[0], 'none')} here). {step}"
        )


def _of_text(tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int]) -> list[str]:
    """Return the tokens that a text may become: all but special ones that nothing uses.

    Text models keep the tokens for images of their family, such as Gemma 3 1B, without an embedding for them.
    """
    used = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token} {tokenizer.pad_token}"
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return [token for token in vocabulary if token not in special or token in used]


def _stored_vocabulary(name: str) -> dict[str, int]:
    """Return the tokens of the tokenizer in a model's directory or on the hub; empty where it cannot be read."""
    if not Path(name).is_dir() and "/" not in name:
        return {}  # the name of a class, about which nobody asks the hub
    try:
        return dict(stored_tokenizer(name).get_vocab())
    except ModelError:
        return {}


def _vocabulary_of(model: str | Path | PreTrainedModel) -> tuple[str, int | None]:
    """Return a model's name and the number of tokens that it has embeddings for, None where its config states none."""
    if isinstance(model, PreTrainedModel):
        return model.name_or_path or type(model).__name__, model.get_input_embeddings().num_embeddings
    path = str(model_directory(model))
    return path, getattr(stored_config(path).get_text_config(), "vocab_size", None)


def stored_config(path: str) -> PretrainedConfig:
    """Return the config of a model, whose weights are not read; raise ModelError when there is none."""
    path = str(model_directory(path))
    with _reading("config of the model", path):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, **hub_options(path))
    return config


def has_4_bits(path: str) -> bool:
    """Return whether the files of a model are in 4 bits of bitsandbytes."""
    setting = getattr(stored_config(path), "quantization_config", None) or {}
    return bool(setting.get("load_in_4bit") or setting.get("_load_in_4bit"))  # the second of old files


def stored_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer as it was saved, with a pad token or without; raise ModelError when there is none."""
    path = str(model_directory(path))
    with _reading("tokenizer", path):
        tokenizer = AutoTokenizer.from_pretrained(path, **hub_options(path))
        return (
            PreTrainedTokenizerFast.from_pretrained(path, **hub_options(path))
            if _cuts_otherwise(tokenizer, Path(path))
            else tokenizer
        )


def _cuts_otherwise(tokenizer: PreTrainedTokenizerBase, directory: Path) -> bool:
    """Whether transformers put another tokenizer in the place of the one in the files.

    It chooses a class by the model's type, and that class may bring its own rules for cutting text into words: a tokenizer
    trained with other rules beside a Qwen2 model would then give other tokens than those it was saved with.
    """
    file = directory / "tokenizer.json"
    if not file.is_file() or not tokenizer.is_fast:
        return False
    stored, loaded = (
        json.loads(text) for text in (file.read_text(encoding="utf-8"), tokenizer.backend_tokenizer.to_str())
    )
    return any(stored.get(part) != loaded.get(part) for part in ("normalizer", "pre_tokenizer"))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def without_dropout(model: nn.Module) -> list[str]:
    """Switch off every dropout of a model, in its modules and its config; return the names of those that were on."""
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


def _from_files(
    path: str | Path,
    dtype: torch.dtype,
    values: bool,
    nf4_skips: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    path = str(model_directory(path))
    config, whole = _configs(path)
    scored = is_scored(path, config, values)
    reports = without_reports() if whole or scored else nullcontext()
    stored, loading = getattr(config, "quantization_config", None), {}
    if stored:  # in other bits, which are dequantized first
        loading = {"device_map": {"": device if nf4_skips is None else "cpu"}}
    elif nf4_skips is not None:
        loading = {"device_map": {"": device}, "quantization_config": nf4(empty_model(path), nf4_skips)}
    with _reading("model", path), without_progress_bars(), reports:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=whole.text_config if whole else config,
            dtype=dtype,
            output_loading_info=True,
            key_mapping=whole.key_mapping() if whole else None,
            use_safetensors=True,  # a pickle can run code
            **loading,
            **hub_options(path),
        )
    refuse_adapted(model, path)
    # transformers fills tensors that a checkpoint lacks with random numbers; training on those is a bug without a sign.
    # It drops tensors that the config has no place for; those of another head, such as `score`, change no log-prob.
    unexpected, children = report["unexpected_keys"], dict(model.named_children())
    of_model = [
        name for name in unexpected if name.partition(".")[0] in children and not _COMPUTED.search(name)
    ]
    report["unexpected_keys"] = whole.of_text(unexpected) if whole else of_model
    if scored:
        report["missing_keys"] = report["missing_keys"] - {"lm_head.weight", "lm_head.bias"}
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, report.get(kind) or ())):
            raise ModelError(
                f"The weights in {path!r} do not fit its config.json: {len(names)} {kind.replace('_', ' ')}, "
                f"{', '.join(names[:3])}. Copy the directory again from its source."
            )
    take_quantized(model, dtype)
    if stored and nf4_skips is not None:
        quantize(model, nf4_skips, device)
    check_finite(model, path)
    setattr(model, ATTRIBUTE, whole)
    if whole:
        of_model = [TensorSpec.of(*named) for named in model.named_parameters()]
        CheckpointNames(model, of_model)  # raises ModelError where the whole cannot be published
    return model


def check_finite(model: nn.Module, name: str) -> None:
    """Raise ModelError for a weight with a NaN or an infinity, which would make every log-prob one."""
    for key, tensor in chain(model.named_parameters(), quantized_weights(model)):
        if tensor.numel() and not torch.stack(tensor.detach().aminmax()).isfinite().all():
            raise ModelError(f"The model {name!r} has a NaN or an infinity in {key}. Copy it again.")


def _configs(path: str) -> tuple[PretrainedConfig, WholeCheckpoint | None]:
    config = stored_config(path)
    whole: WholeCheckpoint | None = None
    if is_around_text(config):
        whole = load("rl4llm.backends.vision_language:WholeCheckpoint")(path, config, **hub_options(path))
    check_kind(path, config, config if whole is None else whole.text_config)
    return config, whole


def _from_first(path: str, dtype: torch.dtype, values: bool, ranks: Ranks) -> PreTrainedModel:
    """Return the model; ranks other than the first get its norms, biases and buffers, but not its matrices."""
    reader = partial(_from_files, values=values) if ranks.is_first else _hollow
    otherwise = ModelError(f"Another rank could not load model.path={path!r}; its own message says why.")
    model = ranks.agree(partial(reader, path, dtype), (ModelError,), otherwise)
    for tensor in (*model.buffers(), *(item for item in model.parameters() if item.dim() < 2)):
        ranks.spread(tensor)
    return model


def _hollow(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model without values: nothing was written to its memory."""
    model = empty_model(path, dtype).to_empty(device="cpu")
    model.tie_weights()
    setattr(model, ATTRIBUTE, _configs(path)[1])  # the first rank writes what this one helps to make whole
    return model


def hub_options(path: str) -> dict[str, bool]:
    """Return what transformers may do: ask the hub only for a name and with a network, and never run code it finds."""
    return {"local_files_only": Path(path).is_dir() or not hub_answers(), "trust_remote_code": False}


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]


@contextmanager
def _reading(what: str, path: str) -> Iterator[None]:
    """Raise ModelError with a next step for what transformers raises about files that it cannot read."""
    try:
        yield
    except UNREADABLE as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        step = "Check that the directory is complete, or copy it again from its source."
        if "trust_remote_code" in str(error):
            step = "Code of a model never runs (auto_map): use a model whose architecture transformers has."
        elif path.startswith((".", "/", "~")) and not Path(path).exists():
            reason, step = ["there is no such directory."], "Check the path."
        elif not Path(path).is_dir():
            step = "Check the name and the network, or use a local copy."
        raise ModelError(
            f"The {what} model.path={path!r} cannot be loaded: {reason[0][:300]} {step}"
        ) from error
