"""The kernels of local mixing, which Triton's interpreter runs on a CPU: each function is a test, and its name is
printed when it has passed."""

import os
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

import longseq.encoders.local
from longseq.attention import TokenGrid
from longseq.encoders import Conv1d, Conv2d, local_kernel
from longseq.encoders.local import LocalLayer
from longseq.encoders.local_kernel import Place, local_mixing, local_mixing_inputs, local_mixing_weights, mixed_locally

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def formula(tokens: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None, prefix: int, columns: int) -> Tensor:
    """Of each tap, the grid shifted by whole tokens."""
    grid = tokens[:, prefix:] if mask is None else tokens[:, prefix:] * mask[:, prefix:, None]
    image = grid.unflatten(1, (-1, columns))
    rows = image.shape[1]
    _, _, height, width = weight.shape
    around = F.pad(image, (0, 0, width // 2, width // 2, height // 2, height // 2))
    change = bias.expand_as(image).clone()
    for y in range(height):
        for x in range(width):
            change = change + weight[:, 0, y, x] * around[:, y : y + rows, x : x + columns]
    return torch.cat([tokens[:, :prefix], tokens[:, prefix:] + change.flatten(1, 2)], dim=1)


def leaves(*parts: Tensor) -> list[Tensor]:
    return [part.detach().requires_grad_() for part in parts]


def assert_near(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    difference = (ours.double() - exact).abs().max()
    assert difference <= tolerance * exact.abs().max().clamp(min=0.1), (difference, exact.abs().max())


def compare(b, rows, columns, d, height=3, width=3, prefix=0, dtype=torch.float32, mask=None, weights=None):
    n = prefix + rows * columns
    tokens = torch.randn(b, n, 2 * d).to(dtype)[..., d:]  # a slice of wider tokens
    parts = leaves(tokens, *(torch.randn(*size).to(weights or dtype) for size in ((d, 1, height, width), (d,))))
    exact_parts = leaves(*(part.double() for part in parts))
    out, exact = mixed_locally(*parts, mask, prefix, columns), formula(*exact_parts, mask, prefix, columns)
    grad = torch.randn(b, n, d).to(dtype)
    gradients = torch.autograd.grad(out, parts, grad)
    expected = torch.autograd.grad(exact, exact_parts, grad.double())
    assert out.dtype == dtype
    assert_near(out, exact, TOLERANCE[dtype])
    for part, ours, best in zip(parts, gradients, expected, strict=True):
        assert ours.dtype == part.dtype and ours.shape == part.shape
        assert_near(ours, best, TOLERANCE[dtype])


def values_and_gradients_are_the_formulas_in_float64() -> None:
    compare(2, 7, 9, 16)
    compare(1, 40, 3, 192)
    for dtype in (torch.float16, torch.bfloat16):
        compare(2, 6, 5, 32, dtype=dtype)
    compare(2, 6, 5, 32, dtype=torch.bfloat16, weights=torch.float32)


def any_grid_kernel_and_width_will_do() -> None:
    compare(3, 1, 1, 1)
    compare(1, 2, 30, 3, 5, 5)
    compare(2, 70, 1, 20, 9, 1)
    compare(1, 1, 33, 100, 3, 7)
    compare(1, 9, 4, 136, 1, 1)


def prefix_tokens_stay_as_they_are() -> None:
    compare(2, 5, 6, 16, prefix=1)
    compare(2, 35, 1, 16, 5, 1, prefix=3)
    tokens = torch.randn(2, 32, 16)
    out = mixed_locally(tokens, torch.randn(16, 1, 3, 3), torch.randn(16), None, 2, 5)
    assert torch.equal(out[:, :2], tokens[:, :2])


def padding_is_zero_for_its_neighbours() -> None:
    mask = torch.arange(32) < torch.tensor([[32], [17]])
    compare(2, 6, 5, 16, prefix=2, mask=mask)
    compare(2, 30, 1, 16, 3, 1, prefix=2, mask=mask)
    compare(2, 6, 5, 16, prefix=2, mask=mask[1:])
    compare(2, 6, 5, 16, prefix=2, mask=mask, dtype=torch.bfloat16)


def every_division_of_the_tokens_gives_the_same_sums() -> None:
    for programs in (1, 3, 100_000):
        with patch.object(local_kernel, "_PROGRAMS", programs):
            compare(3, 11, 7, 24)


def a_gradient_that_repeats_one_number_is_read_in_place() -> None:
    parts = leaves(torch.randn(2, 20, 16), torch.randn(16, 1, 3, 3), torch.randn(16))
    gradients = torch.autograd.grad(mixed_locally(*parts, None, 0, 5).sum(), parts)
    expected = torch.autograd.grad(formula(*parts, None, 0, 5).sum(), parts)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)


def second_derivatives_are_autograds() -> None:
    parts = torch.randn(2, 14, 4), torch.randn(4, 1, 3, 3), torch.randn(4)
    mask, results = torch.arange(14) < torch.tensor([[14], [9]]), []
    for mix in (mixed_locally, formula):
        inputs = leaves(*parts)
        first = torch.autograd.grad(mix(*inputs, mask, 2, 4).pow(3).sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(part.square().sum() for part in first), inputs))  # type: ignore[arg-type]
    for ours, autograds in zip(*results, strict=True):
        assert_near(ours, autograds.double(), 1e-5)


def torch_finds_nothing_wrong_with_the_operators() -> None:
    for mask in (None, torch.arange(22).expand(2, 22) < 15):
        parts = leaves(torch.randn(2, 22, 8), torch.randn(9, 8), torch.randn(8))
        place = list(Place(2, 5, 3, 3))
        torch.library.opcheck(local_mixing, (*parts, mask, place))
        grad, tokens, taps = torch.randn(2, 22, 8), *(part.detach() for part in parts[:2])
        torch.library.opcheck(local_mixing_inputs, (grad, taps, mask, place))
        torch.library.opcheck(local_mixing_weights, (grad, tokens, mask, place))


def layer_of(local, grid: TokenGrid) -> LocalLayer:
    layer = local.build(16, grid)
    for weight in layer.parameters():
        nn.init.normal_(weight)
    return layer


def a_layer_gives_the_same_with_the_kernel_as_with_the_convolution() -> None:
    mask = (torch.arange(44) < torch.tensor([[44], [23]]))[:, None, None]
    for local in (*Conv2d.examples(), *Conv1d.examples()):
        layer = layer_of(local, TokenGrid((6, 7), 2))
        for given in (None, mask):
            for columns in (None, 6, 21):
                tokens = torch.randn(2, 44, 16)
                with patch.object(longseq.encoders.local, "suits_local_kernel", lambda *_: True):
                    ours = layer(tokens, given, columns)
                torch.testing.assert_close(ours, layer(tokens, given, columns), rtol=1e-4, atol=1e-5)


def the_counted_flops_are_two_for_each_token_channel_and_tap_and_twice_that_backward() -> None:
    layer, tokens = layer_of(Conv2d(5), TokenGrid((6, 7), 2)), torch.randn(2, 44, 16, requires_grad=True)
    with (
        patch.object(longseq.encoders.local, "suits_local_kernel", lambda *_: True),
        FlopCounterMode(display=False) as counter,
    ):
        out = layer(tokens)
        ahead = counter.get_total_flops()
        out.sum().backward()
    assert ahead == 2 * 2 * 42 * 16 * 25
    assert counter.get_total_flops() == 3 * ahead


def a_compiled_layer_calls_it_in_one_graph() -> None:
    layer, tokens = layer_of(Conv2d(), TokenGrid((6, 7), 2)), torch.randn(2, 44, 16)
    expected = [layer(tokens), *torch.autograd.grad(layer(tokens).square().sum(), layer.convolution.weight)]
    names: list[str] = []

    def keep_names(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    layer.compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep_names))
    with patch.object(longseq.encoders.local, "suits_local_kernel", lambda *_: True):
        out = layer(tokens)
    gradients = torch.autograd.grad(out.square().sum(), layer.convolution.weight)
    torch.testing.assert_close([out, *gradients], expected, rtol=1e-4, atol=1e-4)
    for name in ("local_mixing", "local_mixing_weights"):
        assert names.count(f"longseq.{name}.default") == 1


TESTS = [
    values_and_gradients_are_the_formulas_in_float64,
    any_grid_kernel_and_width_will_do,
    prefix_tokens_stay_as_they_are,
    padding_is_zero_for_its_neighbours,
    every_division_of_the_tokens_gives_the_same_sums,
    a_gradient_that_repeats_one_number_is_read_in_place,
    second_derivatives_are_autograds,
    torch_finds_nothing_wrong_with_the_operators,
    a_layer_gives_the_same_with_the_kernel_as_with_the_convolution,
    the_counted_flops_are_two_for_each_token_channel_and_tap_and_twice_that_backward,
    a_compiled_layer_calls_it_in_one_graph,
]

if __name__ == "__main__":
    for test in TESTS:
        torch.manual_seed(0)
        test()
        print(test.__name__, flush=True)
