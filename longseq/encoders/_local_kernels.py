"""Triton kernels of local_kernel.py. A program computes some channels of a tile of tokens. Import this module only
where Triton is installed."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's types say little about what its compiler accepts.

import triton
import triton.language as tl

# The number of tokens changes from batch to batch, so Triton must not compile a kernel for each kind of number.
_CHANGING = ["n", "tiles", "of_sample"]


@triton.jit(do_not_specialize=_CHANGING)
def mix(
    x, taps, bias, mask, out,
    n, tiles, prefix, columns, d, x_b, x_n, mask_b, out_b, out_n,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IS_MASKED: tl.constexpr, IS_BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """X + W * X + bias of a tile of BLOCK tokens, with zeros for masked neighbours. In the backward pass x is the
    gradient, the kernel is turned round, there is no bias, and the convolution's part is zero at masked tokens."""
    program = tl.program_id(0)
    blocks = tl.cdiv(d, CHANNELS)
    channels = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    tokens = program // blocks % tiles * BLOCK + tl.arange(0, BLOCK)
    b = (program // blocks // tiles).to(tl.int64)
    inside, is_channel = tokens < n, (channels < d)[None, :]
    on_grid = inside & (tokens >= prefix)
    place = tokens - prefix
    row, column, rows = place // columns, place % columns, (n - prefix) // columns
    x += b * x_b
    mask += b * mask_b
    change = tl.zeros((BLOCK, CHANNELS), tl.float32)
    for height in range(HEIGHT):  # not unrolled: the numbers of all taps would not fit into registers
        down = HEIGHT // 2 - height if IS_BACKWARD else height - HEIGHT // 2
        in_row = on_grid & (row + down >= 0) & (row + down < rows)
        for width in tl.static_range(WIDTH):
            right = WIDTH // 2 - width if IS_BACKWARD else width - WIDTH // 2
            there = in_row & (column + right >= 0) & (column + right < columns)
            neighbour = (tokens + down * columns + right).to(tl.int64)
            if IS_MASKED and not IS_BACKWARD:
                there = there & (tl.load(mask + neighbour, mask=there, other=0) != 0)
            of_neighbour = neighbour[:, None] * x_n + channels[None, :]
            values = tl.load(x + of_neighbour, mask=there[:, None] & is_channel, other=0.0)
            weight = tl.load(taps + (height * WIDTH + width) * d + channels, mask=channels < d, other=0.0)
            change += values.to(tl.float32) * weight.to(tl.float32)[None, :]
    if not IS_BACKWARD:
        change += tl.load(bias + channels, mask=channels < d, other=0.0).to(tl.float32)[None, :]
    if IS_MASKED and IS_BACKWARD:
        on_grid = on_grid & (tl.load(mask + tokens, mask=on_grid, other=0) != 0)
    at = tokens.to(tl.int64)[:, None]
    own = tl.load(x + at * x_n + channels[None, :], mask=inside[:, None] & is_channel, other=0.0).to(tl.float32)
    total = own + tl.where(on_grid[:, None], change, 0.0)
    place_out = out + b * out_b + at * out_n + channels[None, :]
    tl.store(place_out, total.to(out.dtype.element_ty), mask=inside[:, None] & is_channel)


@triton.jit(do_not_specialize=_CHANGING)
def sum_gradients(
    grad, x, mask, parts,
    n, tiles, of_sample, prefix, columns, d, per_program, grad_b, grad_n, x_b, x_n, mask_b,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, IS_MASKED: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradients of the taps, and behind them that of the bias, summed over ``per_program`` tiles of BLOCK tokens of
    the grid. TAPS is the number of taps, rounded up to a power of two."""
    program = tl.program_id(0)
    blocks = tl.cdiv(d, CHANNELS)
    channels = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < d
    first = program // blocks * per_program
    tap = tl.arange(0, TAPS)
    down, right = tap // WIDTH - HEIGHT // 2, tap % WIDTH - WIDTH // 2
    rows = (n - prefix) // columns
    of_taps = tl.zeros((TAPS, BLOCK, CHANNELS), tl.float32)
    of_bias = tl.zeros((BLOCK, CHANNELS), tl.float32)
    for tile in range(first, tl.minimum(first + per_program, tiles)):
        b = (tile // of_sample).to(tl.int64)
        tokens = prefix + tile % of_sample * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < n
        place = tokens - prefix
        row, column = (place // columns)[None, :] + down[:, None], (place % columns)[None, :] + right[:, None]
        there = inside[None, :] & (tap < HEIGHT * WIDTH)[:, None]
        there = there & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        neighbour = (prefix + row * columns + column).to(tl.int64)
        if IS_MASKED:
            there = there & (tl.load(mask + b * mask_b + neighbour, mask=there, other=0) != 0)
        here = b * grad_b + tokens.to(tl.int64)[:, None] * grad_n + channels[None, :]
        gradient = tl.load(grad + here, mask=inside[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        there_too = b * x_b + neighbour[:, :, None] * x_n + channels[None, None, :]
        values = tl.load(x + there_too, mask=there[:, :, None] & is_channel[None, None, :], other=0.0)
        of_taps += values.to(tl.float32) * gradient[None, :, :]
        of_bias += gradient
    parts += (program // blocks).to(tl.int64) * (HEIGHT * WIDTH + 1) * d
    is_tap = (tap < HEIGHT * WIDTH)[:, None] & is_channel[None, :]
    tl.store(parts + tap[:, None] * d + channels[None, :], tl.sum(of_taps, 1), mask=is_tap)
    tl.store(parts + HEIGHT * WIDTH * d + channels, tl.sum(of_bias, 0), mask=is_channel)
