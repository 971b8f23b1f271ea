"""Checkpoints whose text model sits in a vision-language class: the text model trains, all else stays as in the files.

transformers has a causal class for the text part alone. Only that is loaded; what is published and exported is the whole
checkpoint again, with the other tensors read from the files one at a time.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.hub import cached_file

from rl4llm.backends.model_files import INDEX, WEIGHTS
from rl4llm.core.errors import ModelError
from rl4llm.core.weights import TensorSpec
from rl4llm.runs.tensor_file import DTYPES

PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


class WholeCheckpoint:
    """The checkpoint around a text model: its config, and the names of its tensors by file."""

    def __init__(self, path: str, config: PretrainedConfig, **hub: Any):
        self._path, self.config, self._hub = path, config, hub
        self.renamed: dict[str, str] = {}  # what files call a tensor that has another name in transformers

    @cached_property
    def _places(self) -> dict[str, str]:
        """The file of each tensor."""
        file = self._file(WEIGHTS)  # the one that transformers reads, even beside an index
        if file is None:
            index = self._file(INDEX, missing_raises=True)
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        with safe_open(file, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), WEIGHTS)

    @property
    def text_config(self) -> PretrainedConfig:
        """The config of the text model, which ties its embeddings as the whole model does."""
        text = copy.deepcopy(self.config.get_text_config())
        text.tie_word_embeddings = self.config.tie_word_embeddings
        return text

    def key_mapping(self) -> dict[str, str]:
        """Return how `from_pretrained` makes the names in the files those of the text model."""
        prefixes = {name.removesuffix(EMBEDDING) for name in self._places if name.endswith("." + EMBEDDING)}
        if len(prefixes) != 1:
            raise ModelError(
                f"model.path={self._path!r} has {len(prefixes)} tensors {EMBEDDING}, not 1, so its text model is unknown. "
                "Use a checkpoint of the text model alone."
            )
        outputs = {name for name in self._places if name.endswith("." + OUTPUT)}
        return {f"^{re.escape(name)}": OUTPUT for name in outputs} | {
            f"^{re.escape(prefix)}": "model." for prefix in prefixes
        }

    def of_text(self, names: Collection[str]) -> list[str]:
        """Return those of `names` that `key_mapping` gave to tensors of the text model."""
        mapping = self.key_mapping().items()
        renamed = {
            re.sub(old, new, name) for name in self._places for old, new in mapping if re.match(old, name)
        }
        return sorted(renamed.intersection(names))

    def file_name(self, name: str) -> str:
        """Return the name in the files of a tensor of the image side, under any prefix; raise ModelError without one."""
        name = self.renamed.get(name, name)
        matches = [place for place in self._places if place == name or place.endswith(f".{name}")]
        if len(matches) != 1:
            raise ModelError(
                f"model.path={self._path!r} has {len(matches)} tensors named {name}, not 1, so the image side cannot be "
                "published. Set model.vision=frozen."
            )
        return matches[0]

    def others(self, trained: Collection[str], tied: Collection[str]) -> list[TensorSpec]:
        """Describe the tensors that are not in memory; raise ModelError where a trained one is none of the checkpoint's.

        A tied tensor that the files hold a second time is left out, since it would be an old copy.
        """
        unknown = sorted(set(trained) - self._places.keys())
        if unknown:
            raise ModelError(
                f"The text model in {self._path!r} cannot be published as a part of its checkpoint, which has no "
                f"{', '.join(unknown[:3])}. Use a checkpoint of the text model alone."
            )
        names = sorted(self._places.keys() - set(trained) - set(tied))
        return [spec for _, spec in self._read(names, lambda name, tensors: _spec(name, tensors))]

    def read(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors as the files hold them, one at a time."""
        return self._read([spec.name for spec in specs], lambda name, tensors: tensors.get_tensor(name))

    def write_config(self, directory: Path, model: PreTrainedModel) -> None:
        """Write the config of the whole model, and those of its processors."""
        config = copy.deepcopy(self.config)
        config.dtype = model.dtype
        config.save_pretrained(directory)
        for name in PROCESSORS:
            file = self._file(name)
            if file is not None:
                shutil.copyfile(file, directory / name)

    def _read(self, names: Sequence[str], read: Any) -> Iterator[tuple[str, Any]]:
        for place in dict.fromkeys(self._places[name] for name in names):
            with safe_open(self._file(place, missing_raises=True), "pt") as tensors:
                for name in names:
                    if self._places[name] == place:
                        yield name, read(name, tensors)

    def _file(self, name: str, missing_raises: bool = False) -> Any:
        """Return the path of a file of the checkpoint; where it is missing None, or transformers' OSError."""
        file = cached_file(
            self._path,
            name,
            _raise_exceptions_for_missing_entries=missing_raises,
            _raise_exceptions_for_connection_errors=missing_raises,
            **self._hub,
        )
        return None if file is None else Path(file)


def _spec(name: str, tensors: Any) -> TensorSpec:
    part = tensors.get_slice(name)
    dtypes = {short: dtype for dtype, short in DTYPES.items()}
    return TensorSpec(name, tuple(part.get_shape()), dtypes[part.get_dtype()])


FAMILIES = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
"""Text parts for which transformers has no causal class.

They end as every causal language model does: a linear layer without bias over the last hidden states, tied to the embedding
or not. Their vision-language classes show this; other families are not assumed to be so.
"""


class TextPart:
    """What such a class adds to the base class of its family."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _text_class: type[PreTrainedModel]

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self._text_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the last `logits_to_keep` tokens, 0 for all; `options` are those of the text model."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **options,
        )
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


@cache
def register_text_part(kind: type[PretrainedConfig]) -> bool:
    """Make transformers' AutoModelForCausalLM know the text part with this config; return whether it is such a part."""
    if kind.model_type not in FAMILIES:
        return False
    text = AutoModel._model_mapping[kind]
    base = next(parent for parent in text.__mro__[1:] if issubclass(parent, PreTrainedModel))
    name = text.__name__.removesuffix("Model") + "ForCausalLM"
    subclass: Any = type(
        name,
        (TextPart, base, GenerationMixin),
        {"config_class": kind, "_text_class": text, "__module__": __name__, "base_model_prefix": "model"},
    )
    AutoModelForCausalLM.register(kind, subclass, exist_ok=True)  # which it wants for its own configs
    return True
