"""A compiled encoder that meets few shapes, because torch.compile compiles again for every shape.

A batch with fewer samples than a whole one, such as the last one of an epoch, is filled with copies of its last sample.
Sounds are followed by silence, up to one of a few lengths. The outputs are those of the given samples: samples do not
depend on each other, and padding is masked. Both depend on the loader and on the batch alone, and not on earlier
batches: so a training that is resumed in the middle of an epoch computes the same numbers.
"""

from collections.abc import Callable, Mapping, Sized
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import IterableDataset

from longseq.compat.torch import compile_for_shapes, plain_call, replace_call
from longseq.encoders import Encoder
from longseq.encoders._block import run_block

Compile = bool | Literal["blocks", "reduce-overhead"]

_LENGTHS = 8  # of sounds; each takes a compilation, and on average padding of a 16th of the longest clip
_GRAPHS = 256  # of a function at most: lengths, in training and in evaluation, other batch sizes, and forms of blocks


def compile_encoder(encoder: Encoder, how: Compile, whole_batch: Callable[[], int | None], **options: Any) -> None:
    """Compile an encoder in place, so that names in checkpoints stay the same.

    Args:
        encoder: The encoder: its calls, ``token_features`` and ``all_features`` are compiled.
        how: True for one graph of the whole encoder; ``reduce-overhead`` for CUDA graphs of it; ``blocks`` for a graph
            of one block, which blocks of the same form share.
        whole_batch: Returns the number of samples in a whole batch of the current loader; None if it is not known.
        options: Further arguments of torch.compile.
    """

    if how == "reduce-overhead":
        options["mode"] = how
    block = compile_for_shapes(run_block, _GRAPHS, **options) if how == "blocks" else None

    def for_few_shapes(plain: Callable[..., Any]) -> _FewShapes:
        if block is not None:
            return _FewShapes(encoder, plain, _ByBlocks(plain, block), whole_batch)
        run = compile_for_shapes(plain, _GRAPHS, **options)
        return _FewShapes(encoder, plain, _CopiedOutputs(run) if how == "reduce-overhead" else run, whole_batch)

    replace_call(encoder, for_few_shapes(plain_call(encoder)))
    for name in ("token_features", "all_features"):
        setattr(encoder, name, for_few_shapes(getattr(type(encoder), name)))


class _ByBlocks:
    """A function of an encoder that runs a compiled block. Other calls of the trunk, such as those with hooks, run the
    block as it is: each hook would take a compilation."""

    def __init__(self, plain: Callable[..., Any], block: Callable[..., Any]) -> None:
        self._plain, self._block = plain, block

    def __call__(self, encoder: Encoder, inputs: Any) -> Any:
        encoder.trunk.compiled_block = self._block
        try:
            return self._plain(encoder, inputs)
        finally:
            del encoder.trunk.compiled_block


class _CopiedOutputs:
    """A function whose outputs in evaluation are copied out of a CUDA graph's memory: its next run overwrites them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        outputs = self._function(*arguments)
        return outputs if torch.is_grad_enabled() else tree_map_only(Tensor, Tensor.clone, outputs)


def keep_gradients(model: nn.Module) -> None:
    """Make a gradient of zeros for each weight that has none. Gradients are then added to it in place. Otherwise the
    first one would lie in the memory of a CUDA graph, which overwrites it before the next one is added."""
    for weight in model.parameters():
        if weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def samples_of_a_batch(trainer: pl.Trainer | None) -> int | None:
    """The number of samples in a whole batch of the loader in use; None if no loader is in use, or if it does not say.
    A loader with fewer samples has one batch of all."""
    if trainer is None:
        return None
    loaders: Any = None
    if trainer.training:
        loaders = trainer.train_dataloader
    elif trainer.validating or trainer.sanity_checking:
        loaders = trainer.val_dataloaders
    elif trainer.testing:
        loaders = trainer.test_dataloaders
    elif trainer.predicting:
        loaders = trainer.predict_dataloaders
    sizes = [_samples_of_a_batch(loader) for loader in tree_leaves(loaders)]
    return max((size for size in sizes if size is not None), default=None)


def _samples_of_a_batch(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    sampler = getattr(loader, "sampler", None)  # it has the samples of this process
    if not isinstance(size, int) or not isinstance(sampler, Sized) or isinstance(loader.dataset, IterableDataset):
        return size if isinstance(size, int) else None
    return min(size, len(sampler))


class _FewShapes:
    """A compiled function of an encoder and a batch. The function is not bound to the encoder, so a copy of the encoder
    computes with its own weights."""

    def __init__(
        self,
        encoder: Encoder,
        plain: Callable[..., Any],
        compiled: Callable[..., Any],
        whole_batch: Callable[[], int | None],
    ) -> None:
        self._encoder, self._plain, self._compiled, self._whole_batch = encoder, plain, compiled, whole_batch
        self._norms = [part for part in encoder.modules() if isinstance(part, _BatchNorm)]

    def __call__(self, inputs: Any) -> Any:
        encoder = self._encoder
        encoder.measure_if_new(inputs)  # without padding, and not in the graph
        if encoder.varying is not None:
            assert encoder.longest is not None
            is_longer = _length(inputs, encoder) > encoder.longest
            if is_longer and not (encoder.training and encoder.any_length):
                return self._plain(encoder, inputs)  # the length of a recording seldom comes twice
            inputs = _lengthened(inputs, encoder)
        number, whole = len(tree_leaves(inputs)[0]), self._whole_batch() or 0
        if number >= whole or any(norm.training for norm in self._norms):
            return self._compiled(encoder, inputs)
        outputs = self._compiled(encoder, tree_map_only(Tensor, lambda part: _filled(part, whole), inputs))
        return tree_map_only(Tensor, lambda part: part[:number], outputs)


def _length(inputs: Any, encoder: Encoder) -> int:
    """The length of the longest input of a batch."""
    assert encoder.varying is not None
    name, axis = encoder.varying
    return (inputs[name] if isinstance(inputs, Mapping) else inputs).shape[axis]


def _lengthened(inputs: Any, encoder: Encoder) -> Any:
    """Inputs that are followed by padding up to the next eighth of the longest one."""
    assert encoder.varying is not None and encoder.longest is not None
    (name, axis), longest, own = encoder.varying, encoder.longest, _length(inputs, encoder)
    step = -(-longest // _LENGTHS)
    length = -(-own // step) * step
    if own <= longest:
        length = min(length, longest)
    if length == own:
        return inputs
    if not isinstance(inputs, Mapping):
        inputs = {name: inputs, "lengths": torch.full((len(inputs),), own, device=inputs.device)}
    after = inputs[name].ndim - 1 - axis % inputs[name].ndim  # axes behind that of the lengths, which F.pad takes first
    return {**inputs, name: F.pad(inputs[name], (*(0, 0) * after, 0, length - own))}


def _filled(part: Tensor, whole: int) -> Tensor:
    """A tensor of a whole batch, with copies of the last sample."""
    return torch.cat([part, part[-1:].expand(whole - len(part), *part.shape[1:])])
