"""torch: hooks of modules, transformations that no autograd.Function of ours can follow, and what its errors say."""

import re
from typing import Any

import torch
from torch import Tensor


def is_hooked(layer: Any) -> bool:
    """Whether a call of the layer runs hooks, or a forward pass that someone has put in the place of its class's."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in vars(layer)


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode differentiation is at work: our Functions know neither."""
    if torch.compiler.is_compiling():  # the compiler cannot follow the questions below
        return False
    # torch's own autograd.Function asks so; there is no public way
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which x is computed with in its own precision; on the meta device too, which knows no autocast."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of GELU(x)."""
    return torch.ops.aten.gelu_backward(grad, x)


def layer_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor) -> Any:
    """The gradients of x, gamma and beta, of a layer norm over the last dimension."""
    return torch.ops.aten.native_layer_norm_backward(grad, x, gamma.shape, mean, rstd, gamma, beta, [True, True, True])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory; CUDA has several ways to say so."""
    said = ("DefaultCPUAllocator", "[enforce fail", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said)


def asked_of_memory(error: BaseException) -> str | None:
    """How much memory an allocation wanted that failed, with its unit; None if the error does not say."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(error))
    if asked is None:
        return None
    return f"{float(asked[1]) / 2**20:.0f} MiB" if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"  # bytes: of a CPU


def dead_worker(error: BaseException) -> tuple[str, str] | None:
    """The process of a DataLoader that has died, and how; None if the error is another one."""
    found = re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (.*)", str(error))
    return found and (found[1], re.sub(r"\s+", " ", found[2]).split(". ")[0].rstrip(". "))


def is_lost_connection(error: BaseException) -> bool:
    """Whether a process group has lost one of its processes: gloo and NCCL say it in many ways."""
    lost = r"[Cc]onnection (closed|reset|refused)|closed by peer|[Gg]loo|NCCL|[Tt]imed out|[Bb]roken pipe"
    return isinstance(error, RuntimeError) and re.search(lost, str(error)) is not None


def message_of_worker(error: BaseException) -> str:
    """What an error said in the DataLoader's process that raised it, without that process's traceback."""
    said = str(error)
    if not said.startswith("Caught "):
        return said
    return re.split(rf"^[\w.]*{type(error).__name__}: ", said.strip(), flags=re.MULTILINE)[-1]
