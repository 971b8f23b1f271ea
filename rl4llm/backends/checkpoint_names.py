"""A model's tensors in the form of its Hugging Face checkpoint, which servers and other programs read.

In memory transformers may hold them in another form: the experts of a layer fused into one tensor, or names without the
prefix that they have in the file. `save_pretrained` reverts that for all tensors at once; here it is done for one at a time,
or for the few that only convert together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl4llm.backends.model_files import whole_checkpoint
from rl4llm.core.errors import ModelError
from rl4llm.core.images import IMAGE_SIDE
from rl4llm.core.weights import TensorSpec

INCOMPLETE = (KeyError, ValueError, IndexError, TypeError, RuntimeError, AttributeError, StopIteration)
"""What a conversion raises when it gets a part of the tensors that it needs."""
Named = dict[str, Tensor]


class CheckpointNames:
    """How the tensors of a model become those of its checkpoint.

    `own` are the tensors as the model in memory names them. Models whose two forms are the same keep their order. Tensors of
    the checkpoint that are not in memory come last.
    """

    def __init__(self, model: PreTrainedModel, own: Sequence[TensorSpec]):
        self._model, self._whole, self._others = model, whole_checkpoint(model), list[TensorSpec]()
        every = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in own}
        seeing = {
            name: self._whole.file_name(name.removeprefix(f"{IMAGE_SIDE}."))
            for name in every
            if self._whole is not None and name.startswith(f"{IMAGE_SIDE}.")
        }
        named = {name: tensor for name, tensor in every.items() if name not in seeing}
        saved = revert_weight_conversion(model, dict(named))
        self._renamed = {name: name for name in named if saved.get(name) is named[name]}
        self._parts: dict[str, tuple[str, ...]] = {}  # by name: all that convert together with it
        if len(self._renamed) != len(named) or len(saved) != len(named):
            self._find_parts(named, saved)
        self._renamed |= seeing
        saved |= {seeing[name]: every[name] for name in seeing}
        specs = [TensorSpec.of(name, tensor) for name, tensor in self.converted(every.items())]
        if sorted(spec.name for spec in specs) != sorted(saved):
            raise ModelError(
                f"The weights of {type(model).__name__} cannot be converted to the names of a Hugging Face checkpoint one "
                "layer at a time. Train with inference.name=local, which needs no names."
            )
        if self._whole is not None:
            tied = {key: torch.empty(0, device="meta") for key in model.state_dict().keys() - every.keys()}
            self._others = self._whole.others(saved.keys(), revert_weight_conversion(model, tied).keys())
        self.specs = [*specs, *self._others]

    def converted(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the checkpoint; those that convert together are held until the last of them came."""
        waiting: defaultdict[tuple[str, ...], Named] = defaultdict(dict)
        for name, tensor in own:
            if name in self._renamed:
                yield self._renamed[name], tensor
                continue
            names = self._parts[name]
            part = waiting[names]
            # What is gathered from many ranks may be let go of when the next tensor is asked for.
            part[name] = tensor.detach() if len(part) + 1 == len(names) else tensor.detach().clone()
            if len(part) == len(names):
                yield from revert_weight_conversion(self._model, waiting.pop(names)).items()
        if self._whole is not None:
            yield from self._whole.read(self._others)

    def _find_parts(self, named: Named, saved: Named) -> None:
        """Find the smallest sets of tensors that convert apart from all others: single ones, or those of one module."""
        names_left = list(named)
        self._renamed, level = {}, -1
        ids = set(map(id, named.values()))
        while names_left and level <= max(name.count(".") for name in names_left):
            groups: defaultdict[str, list[str]] = defaultdict(list)
            for name in names_left:
                groups[name if level < 0 else ".".join(name.split(".")[: -level - 1])].append(name)
            for names in groups.values():
                self._take({name: named[name] for name in names}, saved, ids)
            names_left = [
                name for name in names_left if name not in self._renamed and name not in self._parts
            ]
            level += 1
        # all at once, which the comparison of names refuses if wrong
        self._parts |= dict.fromkeys(names_left, tuple(names_left))

    def _take(self, tensors: Named, saved: Named, ids: Container[int]) -> None:
        try:
            reverted = revert_weight_conversion(self._model, dict(tensors))
        except INCOMPLETE:
            return
        if not reverted or not all(_same(tensor, saved.get(name), ids) for name, tensor in reverted.items()):
            return
        if len(tensors) == len(reverted) == 1 and id(*reverted.values()) in ids:
            self._renamed |= dict(zip(tensors, reverted, strict=True))
        else:
            self._parts |= dict.fromkeys(tensors, tuple(tensors))


def _same(tensor: Tensor, whole: Tensor | None, own: Container[int]) -> bool:
    """Whether a tensor of a part is the one in the whole: the same object where it was only renamed."""
    if whole is None or id(tensor) in own or id(whole) in own:
        return whole is tensor
    return (tensor.shape, tensor.dtype) == (whole.shape, whole.dtype)
