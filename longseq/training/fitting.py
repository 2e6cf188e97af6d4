"""After a training step ran out of memory, try which smaller steps fit."""

import copy
import gc
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from longseq.compat.torch import has_bfloat16
from longseq.files.checkpoint import CheckpointError
from longseq.files.description import build_from
from longseq.training.classifier import Classifier
from longseq.training.memory import give_back_freed_memory, map_large_blocks


class OutOfMemory(Exception):  # noqa: N818 (as torch names its own)
    """A training step does not fit into memory; the message says which smaller steps fit."""

    exit_code = 6


def let_go_of(error: BaseException) -> None:
    """Free the activations of the failed step, which the frames of its error hold."""
    traceback.clear_frames(error.__traceback__)
    map_large_blocks()
    _give_back_all()


def _give_back_all() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    give_back_freed_memory()


def what_fits(
    model: Classifier,
    batch: Any,
    autocast: Callable[[], AbstractContextManager[Any]],
    has_moments: bool = False,
    accumulated: int = 1,
    has_max_tokens: bool = False,
) -> list[str]:
    """The flags that make a training step fit with room to spare. Each is tried alone: a half, a quarter and so on of
    the batch; activation checkpointing; bfloat16; a half, a quarter and so on of k.

    Args:
        model: The classifier, on the device where it ran out of memory.
        batch: Inputs and labels on that device, at least as large as the batch that did not fit.
        autocast: The precision of the training, as a context.
        has_moments: Whether AdamW's moments are on the device already; if not, memory is reserved for them.
        accumulated: Batches per optimizer step.
        has_max_tokens: Whether the data limits the tokens of a batch (data.max_tokens), and not only its inputs.
    """
    model.zero_grad()
    inputs, labels = batch
    device = model.device.type
    flags: list[str] = []
    try:
        moments = [] if has_moments else [torch.zeros_like(weight) for weight in model.parameters() for _ in range(2)]
    except (RuntimeError, MemoryError):
        return flags

    def fits(model: Classifier, count: int, context: Callable[[], AbstractContextManager[Any]] = autocast) -> bool:
        _give_back_all()
        try:
            examples = _and_a_quarter_more(inputs, count)
            for _ in range(2):  # the second step also holds gradients, and finds fragmented memory
                with context():
                    loss = model(examples).logsumexp(1).sum()
                loss.backward()
        except (RuntimeError, MemoryError) as failure:  # oneDNN raises only "could not create a primitive"
            traceback.clear_frames(failure.__traceback__)
            return False
        finally:
            model.zero_grad()
        return True

    halves = [len(labels) >> shift for shift in range(1, len(labels).bit_length())]
    if count := next((count for count in halves if fits(model, count)), None):
        batches = -(-len(labels) * accumulated // count)
        smaller = f"--data.batch_size {count}"
        if has_max_tokens:  # other batches have more and smaller bags, and as many tokens
            smaller = f"--data.max_tokens {count * inputs['features'].shape[1]}"
        flags.append(f"{smaller} --trainer.accumulate_grad_batches {batches}")
    if not model.encoder.checkpointing and not model.encoder.reversible:
        model.encoder.trunk.set_grad_checkpointing(True)
        if fits(model, len(labels)):
            flags.append("--model.encoder.checkpointing true")
        model.encoder.trunk.set_grad_checkpointing(False)
    with autocast():
        is_low = torch.is_autocast_enabled(device)
    is_useful = device != "cpu" or has_bfloat16()
    if not is_low and is_useful and fits(model, len(labels), lambda: torch.autocast(device, torch.bfloat16)):
        flags.append("--trainer.precision bf16-mixed")
    k = getattr(model.encoder.attention, "k", None)
    for smaller in [k >> shift for shift in range(1, k.bit_length())] if isinstance(k, int) else []:
        description = copy.deepcopy(dict(model.hparams))
        description["encoder"]["init_args"]["attention"]["init_args"]["k"] = smaller
        with suppress(CheckpointError):  # a projection may need a larger k
            other = build_from(Classifier, description).to(model.device)
            other.encoder.set_statistics(model.encoder.mean, model.encoder.std)
            if fits(other, len(labels)):
                flags.append(f"--model.encoder.attention.k {smaller}")
                break
    del moments
    return flags


def _and_a_quarter_more(inputs: Any, count: int) -> Any:
    """The first `count` examples, and a quarter of them again: a training needs more memory than its steps alone, and
    cannot use memory that is free only in small pieces."""
    if isinstance(inputs, Tensor):
        return torch.cat([inputs[:count], inputs[: -(-count // 4)]])
    return {name: _and_a_quarter_more(value, count) for name, value in inputs.items()}
