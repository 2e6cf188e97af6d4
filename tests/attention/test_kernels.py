"""Attention by features of queries and keys, against implementations that no one here wrote."""

from pathlib import Path

import forked
import pytest
import torch
import torch.nn.functional as F
from linear_attention_transformer.linear_attention_transformer import SelfAttention
from performer_pytorch.performer_pytorch import generalized_kernel, linear_attention, softmax_kernel
from timm.layers.attention import Attention
from torch import Tensor

from longseq import ImageEncoder
from longseq.attention import EfficientAttention, Mechanism, Performer, Reformer, TokenGrid
from longseq.attention.heads import Heads
from longseq.attention.layer import softmax_formula
from longseq.attention.others import performer
from longseq.attention.others.linear_transformer import linear_formula
from longseq.attention.others.performer import RandomFeatures, orthogonal_directions
from longseq.training import Classifier

B, H, N, C = 2, 3, 50, 8


def queries_keys_values(scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    return [scale * torch.randn(B, H, N, C, dtype=torch.float64).requires_grad_() for _ in range(3)]


def assert_equal_with_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(theirs, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_the_linear_transformer_is_performer_pytorchs_linear_attention_with_elu_plus_one() -> None:
    inputs = queries_keys_values()
    features = [
        generalized_kernel(x, projection_matrix=None, kernel_fn=F.elu, kernel_epsilon=1.0, normalize_data=False)
        for x in inputs[:2]
    ]
    assert_equal_with_gradients(linear_formula(Heads(*inputs)), linear_attention(*features, inputs[2]), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_far_below_zero_give_a_finite_mean_of_the_values(dtype: torch.dtype) -> None:
    queries, keys, values = (x.detach().to(dtype) for x in queries_keys_values())
    result = linear_formula(Heads(queries - 30, keys - 30, values))
    assert result.isfinite().all() and result.abs().max() > 0.1
    assert (result <= values.amax(-2, keepdim=True) + 0.05).all()
    assert not linear_formula(Heads(queries - 1000, keys, values)).isnan().any()


def test_the_performer_is_performer_pytorchs_with_the_same_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the small number that both add to features, because it is not relative to the same number in both."""
    monkeypatch.setitem(performer.EPSILON, "softmax", 0.0)
    inputs = queries_keys_values()
    formula = RandomFeatures(C, 20, "softmax").double()
    features = [
        softmax_kernel(x, projection_matrix=formula.directions, is_query=is_query, eps=0.0)
        for x, is_query in zip(inputs[:2], (True, False), strict=True)
    ]
    assert_equal_with_gradients(formula(Heads(*inputs)), linear_attention(*features, inputs[2]), inputs)


def test_the_relu_kernel_is_performer_pytorchs() -> None:
    inputs = queries_keys_values()
    formula = RandomFeatures(C, 20, "relu").double()
    features = [generalized_kernel(x, projection_matrix=formula.directions) for x in inputs[:2]]
    assert_equal_with_gradients(formula(Heads(*inputs)), linear_attention(*features, inputs[2]), inputs)


def test_with_many_features_the_performer_is_near_softmax_attention() -> None:
    inputs = [x.detach() for x in queries_keys_values(0.5)]
    exact = softmax_formula(Heads(*inputs))
    errors = [
        float((RandomFeatures(C, m, "softmax").double()(Heads(*inputs)) - exact).norm() / exact.norm())
        for m in (16, 256, 4096)
    ]
    assert errors[0] > 2.5 * errors[1] > 6 * errors[2]  # their root: four is expected, a draw may give less


def test_directions_are_gaussian_and_orthogonal_in_blocks_and_follow_from_their_seed() -> None:
    directions = orthogonal_directions(4000, C, seed=0).double()
    torch.testing.assert_close(directions.T @ directions / 4000, torch.eye(C).double(), rtol=0.0, atol=0.1)
    assert abs(float(directions.norm(dim=1).var()) - (C - float(directions.norm(dim=1).mean()) ** 2)) < 0.2
    blocks = directions.unflatten(0, (-1, C))
    products = blocks @ blocks.mT
    assert (products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))).abs().max() < 1e-5
    assert torch.equal(orthogonal_directions(13, C, seed=7), orthogonal_directions(13, C, seed=7))
    assert not torch.equal(orthogonal_directions(13, C, seed=7), orthogonal_directions(13, C, seed=8))


def test_large_queries_and_keys_give_the_performer_no_overflow() -> None:
    inputs = [x.detach().float() for x in queries_keys_values(100.0)]
    assert RandomFeatures(C, 20, "softmax")(Heads(*inputs)).isfinite().all()


@pytest.mark.parametrize("is_autocast", [True, False])
def test_sums_over_many_tokens_do_not_overflow_float16(is_autocast: bool) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(1, 1, 5000, 32) for _ in range(3)]
    queries, keys, values = (part.half() for part in exact)
    with torch.autocast("cpu", torch.float16, enabled=is_autocast):
        result = linear_formula(Heads(queries, keys, values))
    assert result.dtype == torch.float16
    torch.testing.assert_close(result.float(), linear_formula(Heads(*exact)), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("mechanism", [Performer(), Reformer()], ids=str)
def test_what_draws_by_its_seed_is_built_on_the_meta_device(mechanism: Mechanism) -> None:
    with torch.device("meta"):
        model = Classifier(ImageEncoder((1, 8, 8), mechanism, dim=16, depth=1, heads=2), 2)
    assert all(weight.is_meta for weight in model.parameters())


@pytest.mark.parametrize("is_padded", [False, True])
def test_efficient_attention_is_that_of_linear_attention_transformer(is_padded: bool) -> None:
    """It divides the queries' softmax by sqrt(c) once more, which the paper does not."""
    torch.manual_seed(0)
    (layer,) = EfficientAttention().layers([Attention(H * C, H)], TokenGrid((N, 1)))
    theirs = SelfAttention(H * C, H).double()
    layer = layer.double()
    for linear, weight in zip((theirs.to_q, theirs.to_k, theirs.to_v), layer.qkv.weight.chunk(3), strict=True):
        linear.weight = torch.nn.Parameter(weight.detach())
    theirs.to_out.weight = torch.nn.Parameter(layer.proj.weight.detach() * C**0.5)
    theirs.to_out.bias = layer.proj.bias
    x = torch.randn(B, N, H * C, dtype=torch.float64, requires_grad=True)
    present = torch.arange(N) < torch.tensor([[N], [30]]) if is_padded else None
    ours = layer(x, None if present is None else present[:, None, None])
    expected = theirs(x, input_mask=present)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(x)
    of_x, of_qkv = torch.autograd.grad(ours, [x, layer.qkv.weight], cotangent)
    expected_x, *rest = torch.autograd.grad(
        expected, [x, theirs.to_q.weight, theirs.to_k.weight, theirs.to_v.weight], cotangent
    )
    torch.testing.assert_close(of_x, expected_x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(of_qkv, torch.cat(rest), rtol=1e-10, atol=1e-10)


@pytest.mark.thorough
def test_verma_without_e_is_fla_orgs_linear_attention(tmp_path: Path) -> None:
    """A process of its own, because Triton decides whether it interprets when it is imported."""
    pytest.importorskip("fla", reason="fla-core is not installed")
    done = forked.run(Path(__file__).with_name("verma_by_fla.py"), cwd=tmp_path, fresh=True)
    assert (done.returncode, done.stdout) == (0, "4 gradients are equal\n"), done.stderr
