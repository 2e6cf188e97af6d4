"""The Triton kernels, which Triton's interpreter runs on a CPU: each function is a test, and its name is printed when
it has passed."""

import os
import tempfile
from collections.abc import Callable
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from functorch.compile import make_boxed_func
from timm.layers.attention import Attention
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from longseq import Linformer
from longseq.attention import TokenGrid
from longseq.attention.column_softmax import column_softmax
from longseq.attention.few_keys import Settings, attend_to_few, few_keys, few_keys_backward, run_backward, run_forward
from longseq.attention.heads import Heads

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def with_widened_bfloat16(create_dot: Callable) -> Callable:
    """The interpreter keeps bfloat16 as integers, and would multiply these."""

    def dot(builder, a, b, *others):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle((part.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for part in (a, b))
        return create_dot(builder, a, b, *others)

    return dot


InterpreterBuilder.create_dot = with_widened_bfloat16(InterpreterBuilder.create_dot)


def drawn(b: int, length: int, h: int, c: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(b, h, length, c), stored token by token, as a slice of wider tokens."""
    return torch.randn(b, length, 2 * h * c).to(dtype)[..., h * c :].unflatten(-1, (h, c)).transpose(1, 2)


def leaves(*parts: Tensor) -> list[Tensor]:
    return [part.detach().requires_grad_() for part in parts]


def attend(parts: list[Tensor], mask: Tensor | None = None) -> Tensor:
    queries, keys, values = parts
    return attend_to_few(Heads(queries, keys, values, key_mask=mask))


def formula(parts: list[Tensor], mask: Tensor | None = None) -> Tensor:
    queries, keys, values = parts
    scores = queries @ keys.mT / queries.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask, -1e30)).softmax(-1) @ values


def assert_near(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    difference = (ours.double() - exact).abs().max()
    assert difference <= tolerance * exact.abs().max().clamp(min=0.1), (difference, exact.abs().max())


def compare(b, n, h, c, k, dtype=torch.float32, mask=None, few_grad=False):
    parts = leaves(drawn(b, n, h, c, dtype), drawn(b, k, h, c, dtype), drawn(b, k, h, c, dtype))
    exact_parts = leaves(*(part.double() for part in parts))
    out, exact = attend(parts, mask), formula(exact_parts, mask)
    grad = torch.randn(1, 1, 1, 1).expand_as(out) if few_grad else drawn(b, n, h, c, dtype)
    gradients = torch.autograd.grad(out, parts, grad.to(dtype))
    expected = torch.autograd.grad(exact, exact_parts, grad.to(dtype).double())
    assert out.transpose(1, 2).is_contiguous() and out.dtype == dtype
    for ours, best in zip((out, *gradients), (exact, *expected), strict=True):
        assert ours.dtype == dtype
        assert_near(ours, best, TOLERANCE[dtype])


def values_and_gradients_are_the_formulas_in_float64() -> None:
    for sizes in ((2, 90, 2, 64, 128), (1, 70, 1, 16, 256), (1, 70, 1, 128, 17)):
        compare(*sizes)
    for dtype in (torch.float16, torch.bfloat16):
        compare(1, 130, 2, 32, 40, dtype)


def any_number_of_keys_queries_and_channels_will_do() -> None:
    for sizes in ((2, 3, 1, 16, 1), (1, 64, 2, 24, 7), (3, 65, 1, 96, 33), (1, 1, 2, 17, 16)):
        compare(*sizes)


def a_masked_key_has_no_weight() -> None:
    masks = torch.rand(3, 1, 1, 20) < 0.6
    compare(3, 70, 2, 16, 20, mask=masks)
    compare(3, 70, 2, 16, 20, mask=masks[:1])
    compare(2, 40, 2, 32, 16, torch.bfloat16, mask=torch.arange(16).expand(2, 1, 1, 16) < 9)


def a_query_without_any_key_gets_zeros() -> None:
    parts = leaves(drawn(2, 40, 1, 16), drawn(2, 5, 1, 16), drawn(2, 5, 1, 16))
    out = attend(parts, torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 5))
    gradients = torch.autograd.grad(out.sum(), parts)
    for result in (out, *gradients):
        assert result[0].abs().sum() > 0 and torch.equal(result[1], torch.zeros_like(result[1]))


def large_scores_do_not_overflow() -> None:
    queries, keys, values = drawn(1, 20, 1, 16), drawn(1, 9, 1, 16), drawn(1, 9, 1, 16)
    out = attend_to_few(Heads(100 * queries, 100 * keys, values))
    assert_near(out, formula([100 * queries.double(), 100 * keys.double(), values.double()]), 1e-3)


def a_gradient_that_repeats_one_number_is_read_in_place() -> None:
    compare(2, 70, 2, 16, 9, few_grad=True)


def every_division_of_the_tokens_gives_the_same_sums() -> None:
    queries, keys, values, grad = drawn(1, 150, 2, 16), drawn(1, 20, 2, 16), drawn(1, 20, 2, 16), drawn(1, 150, 2, 16)
    exact_parts = leaves(*(part.double() for part in (queries, keys, values)))
    exact = formula(exact_parts)
    of_queries, of_keys, of_values = torch.autograd.grad(exact, exact_parts, grad.double())
    for block in (16, 64, 512):
        for programs in (1, 3, 1000):
            settings = Settings(block, 4, 1, programs)
            assert_near(run_forward(queries, keys, values, None, settings), exact, 2e-6)
            ours, (our_keys, our_values) = run_backward(grad, queries, keys, values, None, settings)
            assert_near(ours, of_queries, 2e-6)
            assert_near(our_keys.transpose(1, 2), of_keys, 2e-6)
            assert_near(our_values.transpose(1, 2), of_values, 2e-6)


def addresses_may_exceed_32_bits() -> None:
    """The tokens lie far apart in a file without contents, which takes neither memory nor disk."""
    step, n = 1 << 24, 200
    keys, values, near = (drawn(1, length, 1, 16).half().contiguous() for length in (5, 5, n))
    with tempfile.NamedTemporaryFile() as file:
        size = n * step
        numbers = torch.from_file(file.name, shared=True, size=size, dtype=torch.float16)
        far = numbers.as_strided((1, 1, n, 16), (size, size, step, 1)).copy_(near)
        assert torch.equal(few_keys(far, keys, values, None), few_keys(near, keys, values, None))
        expected = few_keys_backward(near, near, keys, values, None)
        for ours, others in zip(few_keys_backward(far, far, keys, values, None), expected, strict=True):
            assert torch.equal(ours, others)


def under_autocast_it_computes_in_bfloat16() -> None:
    parts = leaves(drawn(1, 40, 2, 16), drawn(1, 9, 2, 16), drawn(1, 9, 2, 16).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(parts)
    exact_parts = leaves(*(part.double() for part in parts))
    exact = formula(exact_parts)
    assert out.dtype == torch.bfloat16
    assert_near(out, exact, 2e-2)
    gradients = torch.autograd.grad(out.float().sum(), parts)
    for part, gradient, best in zip(parts, gradients, torch.autograd.grad(exact.sum(), exact_parts), strict=True):
        assert gradient.dtype == part.dtype
        assert_near(gradient, best, 2e-2)


def second_derivatives_are_autograds() -> None:
    parts, mask = [drawn(1, 20, 1, 16), drawn(1, 6, 1, 16), drawn(1, 6, 1, 16)], torch.arange(6)[None, None, None] < 5
    results = []
    for act in (attend, formula):
        inputs = leaves(*parts)
        first = torch.autograd.grad(act(inputs, mask).square().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(part.square().sum() for part in first), inputs))  # type: ignore[arg-type]
    for ours, autograds in zip(*results, strict=True):
        assert_near(ours, autograds.double(), 1e-5)


def torch_finds_nothing_wrong_with_the_operators() -> None:
    parts, mask = leaves(drawn(2, 20, 1, 16), drawn(2, 7, 1, 16), drawn(2, 7, 1, 16)), torch.ones(2, 1, 1, 7).bool()
    torch.library.opcheck(few_keys, (*parts, mask))
    torch.library.opcheck(column_softmax, (torch.randn(2, 5, 20),), test_utils=("test_schema", "test_faketensor"))


def the_counted_flops_are_those_of_the_plain_products() -> None:
    counts = []
    for act in (lambda *qkv: attend(list(qkv)), lambda q, k, v: F.scaled_dot_product_attention(q, k, v)):
        parts = leaves(drawn(2, 50, 3, 16), drawn(2, 9, 3, 16), drawn(2, 9, 3, 16))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            out = act(*parts)
            ahead = counter.get_total_flops()
            out.sum().backward()
        counts.append((ahead, counter.get_total_flops()))
    assert counts[0] == counts[1] == (4 * 2 * 3 * 50 * 9 * 16, 12 * 2 * 3 * 50 * 9 * 16)


def a_compiled_layer_calls_it_in_one_graph() -> None:
    (layer,) = Linformer(8).layers([Attention(32, 2)], TokenGrid((65, 1)))
    x, mask = torch.randn(2, 65, 32), (torch.arange(65) < torch.tensor([[65], [40]]))[:, None, None]
    expected = [layer(x, mask), *torch.autograd.grad(layer(x, mask).square().sum(), layer.qkv.weight)]
    names: list[str] = []

    def keep_names(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch.set_float32_matmul_precision("high")
    layer.compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep_names))
    with patch.multiple("longseq.attention.few_keys", _DEVICE="cpu", _shared_memory_of=lambda index: 1 << 20):
        out = layer(x, mask)
    gradients = torch.autograd.grad(out.square().sum(), layer.qkv.weight)
    torch.testing.assert_close([out, *gradients], expected, rtol=1e-4, atol=1e-5)
    assert names.count("longseq.few_keys.default") == names.count("longseq.few_keys_backward.default") == 1


def softmax_over_tokens_is_torchs_in_every_layout() -> None:
    for scores in (
        10 * torch.randn(2, 700, 70),
        10 * torch.randn(1, 1000, 3),
        10 * drawn(2, 150, 3, 16),
        10 * torch.randn(2, 70, 300).mT,
        torch.randn(2, 5, 20).half(),
    ):
        scores[0, ..., 150:, :2] = scores[..., -1:, :] = -float("inf")
        weights = column_softmax(scores)
        assert weights.dtype == scores.dtype
        assert_near(weights, scores.double().softmax(-2), 1e-6 if scores.dtype == torch.float32 else 1e-3)


def softmax_over_tokens_sums_one_number_in_many_columns() -> None:
    scores = torch.zeros(1, 20_000, 2)
    torch.testing.assert_close(column_softmax(scores), scores + 1 / 20_000, rtol=1e-5, atol=0.0)


TESTS = [
    softmax_over_tokens_is_torchs_in_every_layout,
    softmax_over_tokens_sums_one_number_in_many_columns,
    values_and_gradients_are_the_formulas_in_float64,
    any_number_of_keys_queries_and_channels_will_do,
    a_masked_key_has_no_weight,
    a_query_without_any_key_gets_zeros,
    large_scores_do_not_overflow,
    a_gradient_that_repeats_one_number_is_read_in_place,
    every_division_of_the_tokens_gives_the_same_sums,
    addresses_may_exceed_32_bits,
    under_autocast_it_computes_in_bfloat16,
    second_derivatives_are_autograds,
    torch_finds_nothing_wrong_with_the_operators,
    the_counted_flops_are_those_of_the_plain_products,
    a_compiled_layer_calls_it_in_one_graph,
]

if __name__ == "__main__":
    for test in TESTS:
        torch.manual_seed(0)
        test()
        print(test.__name__, flush=True)
