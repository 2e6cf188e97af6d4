# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Triton kernels of column_softmax.py. Import this module only where Triton is installed."""

import triton
import triton.language as tl

# The number of tokens changes from batch to batch, so Triton must not compile a kernel for each kind of number.
_CHANGING = ["n", "rows", "chunks"]
_LOG2_E = tl.constexpr(1.4426950408889634)  # a GPU has an instruction for powers of two only


@triton.jit
def _place(heads, blocks, chunks):
    """The sample, head, block of columns and chunk of tokens of a program; neighbours have neighbouring columns."""
    program = tl.program_id(0)
    block = program % blocks
    h = (program // blocks % heads).to(tl.int64)
    chunk = program // blocks // heads % chunks
    return (program // blocks // heads // chunks).to(tl.int64), h, block, chunk


@triton.jit(do_not_specialize=_CHANGING)
def column_sums(
    scores, highest, sums, n, rows, chunks, heads, blocks, s_b, s_h, s_n,
    C: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Over the ``rows`` tokens of a chunk, the highest score m of a column, times log2(e), and the sum of exp(score) /
    2^m; -inf and 0 if all scores are -inf."""
    b, h, block, chunk = _place(heads, blocks, chunks)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    scores += b * s_b + h * s_h
    most, total = tl.full((COLUMNS,), float("-inf"), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for start in range(chunk * rows, tl.minimum((chunk + 1) * rows, n), TILE):
        tokens = tl.cast(start, tl.int64) + tl.arange(0, TILE)
        inside = (tokens < tl.minimum((chunk + 1) * rows, n))[:, None] & (columns < C)[None, :]
        tile = tl.load(scores + tokens[:, None] * s_n + columns[None, :], mask=inside, other=float("-inf"))
        tile = tile.to(tl.float32) * _LOG2_E
        higher = tl.maximum(most, tl.max(tile, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # else -inf less -inf would be NaN
        total = total * tl.exp2(most - shift) + tl.sum(tl.exp2(tile - shift[None, :]), 0)
        most = higher
    at = ((b * heads + h) * chunks + chunk) * C + columns
    tl.store(highest + at, most, mask=columns < C)
    tl.store(sums + at, total, mask=columns < C)


@triton.jit(do_not_specialize=_CHANGING)
def column_weights(
    scores, highest, sums, weights, n, rows, chunks, heads, blocks, s_b, s_h, s_n, w_b, w_h, w_n,
    C: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The softmax, from the sums of all chunks. A column whose scores are all -inf gets NaN, as torch's softmax."""
    b, h, block, chunk = _place(heads, blocks, chunks)
    columns, every = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNKS)
    of_chunk = ((b * heads + h) * chunks + every[:, None]) * C + columns[None, :]
    is_there = (every < chunks)[:, None] & (columns < C)[None, :]
    mosts = tl.load(highest + of_chunk, mask=is_there, other=float("-inf"))
    most = tl.max(mosts, 0)
    total = tl.sum(tl.load(sums + of_chunk, mask=is_there, other=0.0) * tl.exp2(mosts - most[None, :]), 0)
    scores += b * s_b + h * s_h
    weights += b * w_b + h * w_h
    for start in range(chunk * rows, tl.minimum((chunk + 1) * rows, n), TILE):
        tokens = tl.cast(start, tl.int64) + tl.arange(0, TILE)
        inside = (tokens < tl.minimum((chunk + 1) * rows, n))[:, None] & (columns < C)[None, :]
        tile = tl.load(scores + tokens[:, None] * s_n + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        tile = tl.exp2(tile * _LOG2_E - most[None, :]) / total[None, :]
        at = weights + tokens[:, None] * w_n + columns[None, :]
        tl.store(at, tile.to(weights.dtype.element_ty), mask=inside)
