"""A GPU that is not there: tensors without numbers that say they are on one, and a list of what a real one would wait
for. It shows tensors left on the CPU, and every point where the host needs a number from the device."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")
# what needs to know how many results there are, besides an index with a mask
COUNTING = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"}


class Waits(TorchDispatchMode):
    """Lists the operations that make the host wait for the device. They get a number that is made up, and go on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        on_gpu = any(isinstance(part, Tensor) and part.is_cuda for part in args)
        if name in ("_local_scalar_dense", "equal"):
            if on_gpu:
                self.note(name)
            else:
                with suppress(DataDependentOutputException):  # a constant has its number
                    return func(*args, **kwargs)
            kind = args[0].dtype
            return True if name == "equal" or kind == torch.bool else -1e9 if kind.is_floating_point else -(10**9)
        masks = args[1] if name.startswith(("index", "_index_put")) and isinstance(args[1], list | tuple) else ()
        counts = name in COUNTING or any(isinstance(mask, Tensor) and mask.dtype == torch.bool for mask in masks)
        leaves = name == "_to_copy" and str(kwargs.get("device")) == "cpu"
        written = name == "copy_" and args[1].is_cuda and not args[0].is_cuda
        masks = [*masks, *args[1:]] if name == "where" else masks  # a number on the CPU is copied to the condition
        arrives = name == "_to_copy" and not on_gpu and getattr(kwargs.get("device"), "type", "") == "cuda"
        arrives |= on_gpu and any(isinstance(mask, Tensor) and not mask.is_cuda for mask in masks)
        if (on_gpu and (counts or leaves)) or written or arrives:
            self.note(name)
        if name == "bincount":
            return torch.zeros(kwargs.get("minlength", 1), dtype=torch.int64, device=args[0].device)
        return func(*args, **kwargs)

    def note(self, what: str) -> None:
        libraries = ("/site-packages/torch/", "/fake_gpu.py")
        frames = [frame for frame in traceback.extract_stack() if not any(name in frame.filename for name in libraries)]
        self.found.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}")


@contextmanager
def fake_gpu() -> Iterator[Waits]:
    """Within, tensors may be on DEVICE. Real ones may be moved to it; `move` does so for a module."""
    with (
        patch.object(Tensor, "backward", lambda loss, *_, **__: walk_back(loss)),
        patch.object(FakeTensor, "__deepcopy__", lambda tensor, memo: tensor.detach().clone(), create=True),
        FakeTensorMode(allow_non_fake_inputs=True),
        Waits() as waits,
    ):
        yield waits


def move(module: nn.Module) -> nn.Module:
    """Put a module on DEVICE: its weights and buffers, and the states of metrics; shared ones stay shared."""
    moved: dict[int, Tensor] = {}
    kept = []  # so that no id is used twice

    def there(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        kept.append(tensor)
        if id(tensor) not in moved:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
            learns = tensor.requires_grad
            moved[id(tensor)] = nn.Parameter(empty, learns) if isinstance(tensor, nn.Parameter) else empty
        return moved[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers, getattr(part, "_defaults", {})):
            for name, tensor in tensors.items():
                tensors[name] = there(tensor)
        for name in getattr(part, "_defaults", {}):
            setattr(part, name, there(getattr(part, name)))
        if hasattr(part, "_device"):
            part._device = DEVICE
    return module


def walk_back(loss: Tensor) -> None:
    """loss.backward(), node by node: torch's engine asks for the streams of a device that is really there."""
    assert loss.grad_fn is not None
    order: list[Any] = []
    seen = set()
    stack: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(after, False) for after, _ in node.next_functions if after is not None]
    given: dict[Any, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
    with torch.no_grad():
        for node in reversed(order):
            about = zip(given.pop(node), node._input_metadata, strict=False)
            grads = [None if grad is None else grad.sum_to_size(meta.shape).to(meta.dtype) for grad, meta in about]
            grads += [None] * (len(node._input_metadata) - len(grads))
            weight = getattr(node, "variable", None)
            if weight is not None:
                (grad,) = grads
                assert grad is not None and grad.device == weight.device, f"{grad.device} for {weight.device}"
                weight.grad = grad if weight.grad is None else weight.grad + grad
                continue
            results = node(*grads)
            results = results if isinstance(results, tuple) else (results,)
            for (after, place), grad in zip(node.next_functions, results, strict=False):
                if after is None:
                    continue
                slots = given.setdefault(after, [])
                slots += [None] * (place + 1 - len(slots))
                before = slots[place]
                slots[place] = grad if before is None else before if grad is None else before + grad
