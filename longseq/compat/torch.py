"""torch: hooks of modules, transformations that our Functions do not support, precision, and torch's errors."""

import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def _has_triton() -> bool:
    """Whether Triton's kernels can run on this machine's GPU, if it has one. torch for CPUs comes without Triton, which
    builds a small program in C, with the compiler and the header that triton.runtime.build looks for."""
    if find_spec("triton") is None or torch.version.hip is not None:
        return False
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(has_compiler) and Path(include, "Python.h").exists()


HAS_TRITON = _has_triton()


def is_hooked(layer: Any) -> bool:
    """Whether a call of the layer runs hooks, or a forward method of the object instead of that of its class."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in vars(layer)


def is_plain(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a layer is exactly of one of these classes and depends on its weights alone, so that a short cut may read
    these without calling the layer.

    Adapters (LoRA), quantisation and FSDP change the class of a layer or of its weight. Pruning, old weight norms and
    users register hooks on it. A parametrization changes its class.
    """
    if type(layer) not in kinds or is_hooked(layer):
        return False
    return all(type(weight) in (nn.Parameter, Tensor) for weight in (*layer.parameters(False), *layer.buffers(False)))


def is_compiled(module: nn.Module) -> bool:
    """Whether its compile method was called."""
    return module._compiled_call_impl is not None


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """What a call of the module runs if it is not compiled, with hooks: a function of the module and the arguments."""
    return type(module)._call_impl


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let calls of the module run a function of the arguments instead, as its compile method does. The function is not
    part of a copy."""
    module._compiled_call_impl = call


def compile_for_shapes(function: Callable[..., Any], most: int, **options: Any) -> Callable[..., Any]:
    """torch.compile, with a graph for each shape.

    Args:
        function: The function.
        most: The number of graphs. After 8, torch by itself runs the function without compiling it. (timm raises that
            number for the whole process, but does not promise it.)
        options: Further arguments of torch.compile.
    """
    # the Fourier transform is a call of a library, compiled or not
    warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex operators")
    compiled = torch.compile(function, dynamic=False, **options)

    def call(*arguments: Any, **named: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=max(most, torch._dynamo.config.recompile_limit)):
            return compiled(*arguments, **named)

    return call


def seconds_of_compilations() -> float:
    """How long this process has compiled graphs, forward and backward."""
    if "torch._dynamo.utils" not in sys.modules:  # it takes a second to import
        return 0.0
    return torch._dynamo.utils.calculate_time_spent()["total_wall_time"]


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode differentiation is active: our Functions support neither."""
    if torch.compiler.is_compiling():  # the compiler cannot trace the next calls
        return False
    # the way in which torch's own autograd.Function asks; there is no public one
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def without_autocast(x: Tensor) -> torch.autocast:
    """A context that computes with x in its own precision, also on the meta device, which has no autocast."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def has_bfloat16_autocast(x: Tensor) -> bool:
    """Whether layers compute in bfloat16 on the device of x, because of autocast."""
    kind = x.device.type
    return not x.is_meta and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16


def at_least_float32(x: Tensor) -> Tensor:
    """The same numbers, in float32 if their own precision is lower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ExactBuffers(nn.Module):
    """A module some of whose buffers stay in float32 when it gets a lower precision.

    Attributes:
        exact: Their names.
    """

    exact: ClassVar[tuple[str, ...]]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = [getattr(self, name) for name in self.exact]
        super()._apply(fn, recurse)
        for name, values in zip(self.exact, before, strict=True):
            now = getattr(self, name)
            if at_least_float32(now).dtype != now.dtype:
                setattr(self, name, values.to(now.device))
        return self


def has_bfloat16() -> bool:
    """Whether this computer's processor has instructions for bfloat16. Without them a training step takes about ten
    times as long as in float32."""
    if platform.machine() not in ("x86_64", "AMD64"):  # torch knows only these
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def processors(device: torch.device) -> int:
    """The streaming multiprocessors of a CUDA GPU; elsewhere, where Triton interprets its kernels, 2."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def gpu_joules(device: torch.device) -> float | None:
    """The energy that a GPU has used since its driver was loaded, from NVML; None if it is not known. NVML counts GPUs
    without regard to CUDA_VISIBLE_DEVICES, so torch finds the right one."""
    if device.type != "cuda" or find_spec("pynvml") is None:
        return None
    import pynvml  # type: ignore[import-not-found]

    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(torch.cuda._get_pynvml_handler(device)) / 1000
    except (pynvml.NVMLError, RuntimeError):  # old GPUs and parts of a GPU (MIG) count none
        return None


def with_adjacent_channels(part: Tensor) -> Tensor:
    """The tensor, or a copy, with the numbers of its last dimension side by side, as Triton's kernels read them."""
    return part if part.stride(-1) == 1 else part.contiguous()


def bytes_of_mask(mask: Tensor | None, instead: Tensor) -> tuple[Tensor, int]:
    """A mask's bytes, (b, n), and their step from one sample to the next, for a kernel of Triton; without a mask any
    tensor, which is not read."""
    if mask is None:
        return instead, 0
    mask = mask.contiguous()
    return mask.view(torch.uint8), mask.stride(0) if len(mask) > 1 else 0


def gradients_by_autograd(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of a function of the inputs, which have derivatives in turn; None where none is needed: what a
    Function's backward pass returns under ``create_graph``."""
    # without views, a gradient would also flow through the inputs' own history, if a graph uses one of them twice
    inputs = [part.view_as(part) for part in inputs]
    wanted = [part for part, is_needed in zip(inputs, needed, strict=True) if is_needed]
    gradients = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return [next(gradients) if is_needed else None for is_needed in needed]


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of GELU(x)."""
    return torch.ops.aten.gelu_backward(grad, x)


def layer_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor) -> Any:
    """The gradients of x, gamma and beta, of a layer norm over the last dimension."""
    return torch.ops.aten.native_layer_norm_backward(grad, x, gamma.shape, mean, rstd, gamma, beta, [True, True, True])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is due to too little memory; CUDA has several messages for it."""
    messages = ("DefaultCPUAllocator", "[enforce fail", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in messages)


def asked_of_memory(error: BaseException) -> str | None:
    """The size of a failed allocation, with its unit; None if the message does not contain it."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(error))
    if match is None:
        return None
    # on CPUs the unit is bytes
    return f"{float(match[1]) / 2**20:.0f} MiB" if match[2] == "bytes" else f"{match[1]} {match[2]}"


def dead_worker(error: BaseException) -> tuple[str, str] | None:
    """The id of a DataLoader process that has died, and how it died; None if it is another error."""
    match = re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (.*)", str(error))
    return match and (match[1], re.sub(r"\s+", " ", match[2]).split(". ")[0].rstrip(". "))


def is_lost_connection(error: BaseException) -> bool:
    """Whether a process group has lost one of its processes; gloo and NCCL have many messages for it."""
    lost = r"[Cc]onnection (closed|reset|refused)|closed by peer|[Gg]loo|NCCL|[Tt]imed out|[Bb]roken pipe"
    return isinstance(error, RuntimeError) and re.search(lost, str(error)) is not None


def message_of_worker(error: BaseException) -> str:
    """The message of an error, without the traceback that torch adds if a DataLoader process raised it."""
    message = str(error)
    if not message.startswith("Caught "):
        return message
    return re.split(rf"^[\w.]*{type(error).__name__}: ", message.strip(), flags=re.MULTILINE)[-1]
