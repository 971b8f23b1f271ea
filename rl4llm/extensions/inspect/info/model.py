"""What rl4llm does with a model: how it is sampled and trained, and how a turn ends.

Its configuration and its tokenizer are read, but not its weights. A run proves at its start, with numbers, what is derived
here from the architecture alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from rl4llm.backends.checkpoint_names import CheckpointNames
from rl4llm.backends.models import empty_model, load_tokenizer, stored_tokenizer
from rl4llm.commands.output import Facts
from rl4llm.core.errors import RL4LLMError
from rl4llm.core.weights import TensorSpec
from rl4llm.data.render import Renderer
from rl4llm.inference.embedded.llama_decode import LlamaDecoder, UnsupportedModelError
from rl4llm.inference.embedded.model_decode import Layers, ModelDecoder
from rl4llm.inference.paths import context_limit


def facts_of(path: str) -> Facts:
    """Return the table of a model directory or hub name; raise ModelError for a configuration that cannot be read."""
    model = empty_model(path)
    rows = [
        ("architecture", type(model).__name__),
        ("parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}"),
        ("servers take its weights", _names(model)),
        *_engine(model),
        *_tokenizer(path),
    ]
    return Facts("model", path, ("what", "answer"), rows)


def _names(model: PreTrainedModel) -> str:
    """Return whether weights can be published as a checkpoint has them."""
    specs = [TensorSpec.of(name, parameter) for name, parameter in model.named_parameters()]
    try:
        published = CheckpointNames(model, specs).specs
    except RL4LLMError as error:
        return f"no: {error}"
    names = {spec.name for spec in specs} - {spec.name for spec in published}
    converted = f"; {len(names)} tensors in memory are converted, such as {min(names)}" if names else ""
    return f"yes: {len(published)} tensors by the names of its checkpoint{converted}"


def _engine(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yield how the embedded engine and the trainer run the model."""
    try:
        length, reason = context_limit(model, None)
        windows = Layers(model).windows.items()
        yield "layers", ", ".join(f"{kind} of {size} tokens" if size else kind for kind, size in windows)
        yield "context", f"{length} tokens ({reason})"
        yield "engine", _path(model, length)
    except RL4LLMError as error:
        yield "engine", str(error)


def _path(model: PreTrainedModel, context_length: int) -> str:
    try:
        return f"{LlamaDecoder(model, context_length).name}: functions for models like Llama"
    except UnsupportedModelError as error:
        return f"{ModelDecoder(model).name}: the forward of transformers, since {error}"


def _tokenizer(path: str) -> Iterator[tuple[str, str]]:
    """Yield whether prompts can be built, and what ends a turn."""
    try:
        tokenizer: Any = load_tokenizer(path)
    except RL4LLMError as error:
        yield "tokenizer", str(error)
        try:
            tokenizer = stored_tokenizer(path)
        except RL4LLMError:
            return
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    try:
        ends = tokenizer.convert_ids_to_tokens(list(Renderer(tokenizer).stop_token_ids))
        yield "end of turn", ", ".join(ends)
    except RL4LLMError as error:
        yield "chat template", str(error)
        return
    key = "enable_thinking"
    switches = key in str(tokenizer.get_chat_template())
    yield "thinking", f"env.template_args.{key} switches it" if switches else "the template has no switch"
