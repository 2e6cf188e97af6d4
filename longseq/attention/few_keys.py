"""softmax(Q K' / sqrt(c)) V of many queries and few keys by one kernel on a GPU, forward and backward.

The keys and values of a head stay on chip, so neither the n x k matrix of weights nor its sums are stored: the backward
pass computes the weights again. Queries, keys and values are read where the layer has put them, without a copy. The
gradients of keys and values are sums over tokens: each program of the GPU writes a partial sum, so nothing depends on
the order in which programs finish.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from longseq.attention.heads import Heads
from longseq.attention.mixer import masked_scores
from longseq.compat.torch import (
    HAS_TRITON,
    bytes_of_mask,
    gradients_by_autograd,
    is_transformed,
    processors,
    with_adjacent_channels,
)

# When the kernel is used, and how it is launched (settings_for).
_DEVICE = "cuda"
_MOST_KEYS = 256
_QUERIES_A_KEY = 4  # with fewer queries for each key, torch's fused kernel has enough work for all processors
_CHANNELS = range(16, 129)  # of a head
_MOST_NUMBERS = 16384  # of a head's padded keys: two sums of this size must fit into registers
# Triton's shared memory over what _shared_memory counts: at most 1.34, for compute capabilities 8.0, 8.9 and 9.0
_SPARE = 1.5


class Settings(NamedTuple):
    """How a kernel is launched.

    Attributes:
        block: Queries of a tile.
        warps: Groups of 32 threads in a program.
        stages: Tiles in flight; while one is computed, the next ones are read.
        programs: Wanted programs for each processor of the GPU. More programs share the work more evenly; fewer read
            the keys less often and leave fewer partial sums.
    """

    block: int
    warps: int
    stages: int
    programs: int


def settings_for(dtype: torch.dtype, c: int, k: int, is_backward: bool, memory: float = math.inf) -> Settings:
    """How the kernels are launched for heads of c channels and k keys: the fastest of an H200 for 64 channels and 128
    keys in bfloat16 (benchmarks/few_keys.py). Smaller tiles are for more keys, which was not measured, and for a GPU
    whose programs have less shared memory, in bytes."""
    if not is_backward:
        return Settings(64, 4, 3, 8)
    if _padded(c) * _padded(k) * dtype.itemsize > 16384:
        return Settings(32, 8, 2, 4)
    fastest = Settings(128, 8, 2, 2)
    return fastest if _shared_memory(fastest, dtype, c, k) <= memory else Settings(64, 4, 2, 4)


def suits_few_keys(heads: Heads) -> bool:
    """Whether ``attend_to_few`` can compute these heads, and is expected to be faster than torch's fused kernel. It
    depends on shapes, types and the device only, so a compiler sees no branch."""
    queries, keys, values, _, key_mask, dropout = heads
    if queries.device.type != _DEVICE or not HAS_TRITON or dropout or is_transformed():
        return False
    if torch.compiler.is_exporting():  # an exported program must run without longseq
        return False
    (b, h, n, c), k = queries.shape, keys.shape[2]
    if not (1 <= k <= _MOST_KEYS and n >= _QUERIES_A_KEY * k and c in _CHANNELS):
        return False
    if keys.shape != (b, h, k, c) or values.shape != (b, h, k, c):
        return False
    if key_mask is not None and key_mask.shape[1:] != (1, 1, k):
        return False
    dtypes = {_dtype(part) for part in (queries, keys, values)}
    if len(dtypes) > 1 or _padded(k) * _padded(c) > _MOST_NUMBERS:
        return False
    (dtype,) = dtypes
    is_fast = dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and _allows_tf32())
    memory = _shared_memory_of(queries.device.index or 0)
    return is_fast and _shared_memory(settings_for(dtype, c, k, True, memory), dtype, c, k) <= memory


def attend_to_few(heads: Heads) -> Tensor:
    """softmax(Q K' / sqrt(c)) V, (b, h, n, c), stored token by token; under autocast in its precision."""
    queries, keys, values = (part.to(_dtype(part)) for part in heads[:3])
    return few_keys(queries, keys, values, heads.key_mask)


@torch.library.custom_op("longseq::few_keys", mutates_args=())
def few_keys(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(Q K' / sqrt(c)) V with a mask of keys (b, 1, 1, k) or (1, 1, 1, k), False at keys without weight. A query
    without any key gets zeros."""
    settings = settings_for(queries.dtype, queries.shape[3], keys.shape[2], is_backward=False)
    return run_forward(queries, keys, values, mask, settings)


@torch.library.custom_op("longseq::few_keys_backward", mutates_args=())
def few_keys_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of the queries, (b, h, n, c), and of keys and values, (2, b, k, h, c)."""
    memory = _shared_memory_of(queries.device.index or 0)
    settings = settings_for(queries.dtype, queries.shape[3], keys.shape[2], is_backward=True, memory=memory)
    return run_backward(grad, queries, keys, values, mask, settings)


def run_forward(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, settings: Settings) -> Tensor:
    """few_keys, launched in this way."""
    queries, keys, values = (with_adjacent_channels(part) for part in (queries, keys, values))
    out = _by_token(queries)
    programs, tiles = _share(queries, settings.block, settings.programs)
    (b, h, n, _), k = queries.shape, keys.shape[2]
    pointer, step = bytes_of_mask(None if mask is None else mask[:, 0, 0], queries)
    strides = [stride for part in (queries, keys, values) for stride in part.stride()[:3]]
    with torch.cuda.device_of(queries):
        _kernels().attend[(programs * b * h,)](
            queries, keys, values, pointer, out, n, k, tiles, h, programs, *strides, step, *out.stride()[:3],
            **_constants(queries, keys, mask, settings),
        )  # fmt: skip
    return out


def run_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """few_keys_backward, launched in this way."""
    grad, queries, keys, values = (with_adjacent_channels(part) for part in (grad, queries, keys, values))
    grad_queries = _by_token(queries)
    programs, tiles = _share(queries, settings.block, settings.programs)
    (b, h, n, c), k = queries.shape, keys.shape[2]
    pointer, step = bytes_of_mask(None if mask is None else mask[:, 0, 0], queries)
    strides = [stride for part in (queries, keys, values) for stride in part.stride()[:3]]
    parts = keys.new_empty(2, programs, b, k, h, c, dtype=keys.dtype if programs == 1 else torch.float32)
    with torch.cuda.device_of(queries):
        _kernels().attend_backward[(programs * b * h,)](
            queries, keys, values, pointer, grad, grad_queries, parts, n, k, tiles, h, programs, b, *strides, step,
            *grad.stride()[:3], *grad_queries.stride()[:3], **_constants(queries, keys, mask, settings),
        )  # fmt: skip
    return grad_queries, parts[:, 0] if programs == 1 else parts.sum(1).to(keys.dtype)


@few_keys.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return _by_token(queries)


@few_keys_backward.register_fake
def _(grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    b, h, k, c = keys.shape
    return _by_token(queries), keys.new_empty(2, b, k, h, c)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    queries, keys, values, mask = ctx.saved_tensors
    if torch.is_grad_enabled():  # for second derivatives, which only autograd can compute
        formula = partial(_by_formula, mask=mask)
        return *gradients_by_autograd(formula, (queries, keys, values), grad, ctx.needs_input_grad[:3]), None
    of_queries, of_few = few_keys_backward(grad, queries, keys, values, mask)
    of_keys, of_values = of_few.transpose(2, 3)
    return of_queries, of_keys, of_values, None


few_keys.register_autograd(_gradients, setup_context=_keep_inputs)


def _by_formula(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    scores = masked_scores(queries @ keys.mT * queries.shape[-1] ** -0.5, mask)
    return scores.softmax(-1) @ values


@register_flop_formula(torch.ops.longseq.few_keys)
def _flops(queries: torch.Size, keys: torch.Size, *_: Any, **__: Any) -> int:
    """Two products of n x c and c x k in each head."""
    return 4 * math.prod(queries) * keys[2]


@register_flop_formula(torch.ops.longseq.few_keys_backward)
def _flops_backward(grad: torch.Size, queries: torch.Size, keys: torch.Size, *_: Any, **__: Any) -> int:
    """Four products. The fifth, which computes the weights again, is not the model's work."""
    return 8 * math.prod(queries) * keys[2]


def _kernels() -> Any:
    from longseq.attention import _few_keys_kernels  # here, because torch for CPUs comes without Triton

    return _few_keys_kernels


def _dtype(part: Tensor) -> torch.dtype:
    """The type in which a product of this tensor is computed."""
    device = part.device.type
    is_cast = torch.is_autocast_enabled(device) and part.is_floating_point() and part.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else part.dtype


def _padded(size: int) -> int:
    """The next power of two, at least the 16 of a tensor core."""
    return max(16, 1 << (size - 1).bit_length())


def _by_token(queries: Tensor) -> Tensor:
    """An empty tensor (b, h, n, c) that is stored token by token."""
    b, h, n, c = queries.shape
    return queries.new_empty(b, n, h, c).transpose(1, 2)


def _share(queries: Tensor, block: int, wanted: int) -> tuple[int, int]:
    """The number of programs for each head of a sample, and the most tiles of queries that one of them computes."""
    b, h, n, _ = queries.shape
    tiles = -(-n // block)
    programs = min(tiles, -(-wanted * processors(queries.device) // (b * h)))
    of_program = -(-tiles // programs)
    return -(-tiles // of_program), of_program


def _shared_memory(settings: Settings, dtype: torch.dtype, c: int, k: int) -> float:
    """Bytes that a program of the backward pass needs at most: of keys and values, of the tiles in flight, and of a
    tile's weights."""
    block, _, stages, _ = settings
    c, k = _padded(c), _padded(k)
    return _SPARE * (2 * k * c + 2 * stages * block * c + block * k) * dtype.itemsize


@torch.compiler.assume_constant_result
def _shared_memory_of(index: int) -> int:
    """Bytes that a program may have on this GPU; 0 without a GPU, or with one that has no bfloat16."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(index) < (8, 0):
        return 0
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


def _constants(queries: Tensor, keys: Tensor, mask: Tensor | None, settings: Settings) -> dict[str, Any]:
    c, k = queries.shape[3], keys.shape[2]
    return {
        "C": c,
        "CHANNELS": _padded(c),
        "KEYS": _padded(k),
        "SCALE": c**-0.5 * math.log2(math.e),
        "IS_MASKED": mask is not None,
        "HAS_GAPS": mask is not None or k != _padded(k),
        "BLOCK": settings.block,
        "PRECISION": "tf32" if _allows_tf32() else "ieee",  # of float32; other types are multiplied as they are
        "num_warps": settings.warps,
        "num_stages": settings.stages,
    }


@torch.compiler.assume_constant_result
def _allows_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"
