"""Triton kernels of few_keys.py. A program computes one head for several tiles of queries; the keys and values of the
head stay on chip. Import this module only where Triton is installed."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton's types say little about what its compiler accepts.

import triton
import triton.language as tl

# The number of tokens changes from batch to batch, so Triton must not compile a kernel for each kind of number.
_CHANGING = ["n", "num_keys", "tiles", "programs", "batch"]


@triton.jit
def _few(
    start, num_keys, stride, C: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The keys or values of a head, (KEYS, CHANNELS), with zeros behind num_keys and C."""
    rows, columns = tl.arange(0, KEYS), tl.arange(0, CHANNELS)
    inside = (rows < num_keys)[:, None] & (columns < C)[None, :]
    return tl.load(start + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _weights(scores, is_key, SCALE: tl.constexpr, HAS_GAPS: tl.constexpr):
    """exp(scale * scores - their maximum), with zeros where there is no key, and its row sums. SCALE contains log2(e),
    because a GPU has an instruction for powers of two only."""
    if HAS_GAPS:
        scores = tl.where(is_key[None, :], scores, float("-inf"))
    highest = tl.max(scores, 1) * SCALE
    if HAS_GAPS:
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # no key at all: weights are 0, not NaN
    weights = tl.exp2(scores * SCALE - highest[:, None])
    sums = tl.sum(weights, 1)
    if HAS_GAPS:
        sums = tl.where(sums == 0.0, 1.0, sums)
    return weights, sums


@triton.jit(do_not_specialize=_CHANGING[:-1])
def attend(
    q, k, v, mask, out,
    n, num_keys, tiles, heads, programs,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, mask_b, out_b, out_h, out_n,
    C: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_GAPS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """softmax(Q K' scale) V for ``tiles`` tiles of BLOCK queries. Neighbouring programs have the same tokens and other
    heads, so that they read neighbouring addresses."""
    program = tl.program_id(0)
    h = (program % heads).to(tl.int64)
    chunk = program // heads % programs
    b = (program // heads // programs).to(tl.int64)
    keys = _few(k + b * k_b + h * k_h, num_keys, k_n, C, CHANNELS, KEYS)
    values = _few(v + b * v_b + h * v_h, num_keys, v_n, C, CHANNELS, KEYS)
    is_key = tl.arange(0, KEYS) < num_keys
    if IS_MASKED:
        is_key = is_key & (tl.load(mask + b * mask_b + tl.arange(0, KEYS), mask=is_key, other=0) != 0)
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    q += b * q_b + h * q_h
    out += b * out_b + h * out_h
    for tile in range(chunk * tiles, tl.minimum((chunk + 1) * tiles, tl.cdiv(n, BLOCK))):
        first = tl.cast(tile, tl.int64) * BLOCK  # n times a stride may exceed 32 bits, a tile's offsets do not
        inside = (first + rows < n)[:, None]
        if C != CHANNELS:
            inside = inside & (columns < C)[None, :]
        queries = tl.load(q + first * q_n + (rows[:, None] * q_n + columns[None, :]), mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        weights, sums = _weights(scores, is_key, SCALE, HAS_GAPS)
        mixed = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION) / sums[:, None]
        tl.store(out + first * out_n + (rows[:, None] * out_n + columns[None, :]), mixed.to(queries.dtype), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)
def attend_backward(
    q, k, v, mask, grad, grad_q, grad_kv,
    n, num_keys, tiles, heads, programs, batch,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, mask_b, grad_b, grad_h, grad_n, grad_q_b, grad_q_h, grad_q_n,
    C: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_GAPS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, and this program's part of those of keys and values, (2, programs, b, k, h, c)."""
    program = tl.program_id(0)
    h = (program % heads).to(tl.int64)
    chunk = program // heads % programs
    b = (program // heads // programs).to(tl.int64)
    keys = _few(k + b * k_b + h * k_h, num_keys, k_n, C, CHANNELS, KEYS)
    values = _few(v + b * v_b + h * v_h, num_keys, v_n, C, CHANNELS, KEYS)
    is_key = tl.arange(0, KEYS) < num_keys
    if IS_MASKED:
        is_key = is_key & (tl.load(mask + b * mask_b + tl.arange(0, KEYS), mask=is_key, other=0) != 0)
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    q += b * q_b + h * q_h
    grad += b * grad_b + h * grad_h
    grad_q += b * grad_q_b + h * grad_q_h
    grad_keys = tl.zeros((KEYS, CHANNELS), tl.float32)
    grad_values = tl.zeros((KEYS, CHANNELS), tl.float32)
    for tile in range(chunk * tiles, tl.minimum((chunk + 1) * tiles, tl.cdiv(n, BLOCK))):
        first = tl.cast(tile, tl.int64) * BLOCK
        inside = (first + rows < n)[:, None]
        if C != CHANNELS:
            inside = inside & (columns < C)[None, :]
        queries = tl.load(q + first * q_n + (rows[:, None] * q_n + columns[None, :]), mask=inside, other=0.0)
        grads = tl.load(grad + first * grad_n + (rows[:, None] * grad_n + columns[None, :]), mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        weights, sums = _weights(scores, is_key, SCALE, HAS_GAPS)
        weights *= (1.0 / sums)[:, None]
        grad_values = tl.dot(tl.trans(weights.to(grads.dtype)), grads, grad_values, input_precision=PRECISION)
        grad_weights = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        grad_weights -= tl.sum(weights * grad_weights, 1)[:, None]
        grad_scores = (weights * grad_weights).to(queries.dtype)  # the scale follows, of fewer numbers
        of_queries = tl.dot(grad_scores, keys, input_precision=PRECISION) * (C**-0.5)
        at = grad_q + first * grad_q_n + (rows[:, None] * grad_q_n + columns[None, :])
        tl.store(at, of_queries.to(queries.dtype), mask=inside)
        grad_keys = tl.dot(tl.trans(grad_scores), queries, grad_keys, input_precision=PRECISION)
    few = tl.arange(0, KEYS)
    inside = (few < num_keys)[:, None] & (columns < C)[None, :]
    at = (((chunk * batch + b) * num_keys + few[:, None]) * heads + h) * C + columns[None, :]
    tl.store(grad_kv + at, grad_keys * (C**-0.5), mask=inside)
    half = (programs * batch).to(tl.int64) * num_keys * heads * C
    tl.store(grad_kv + half + at, grad_values, mask=inside)
