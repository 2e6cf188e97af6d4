"""Value and gradient of every mechanism equal those of its paper's formula, written naively in float64."""

import math

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.attention import (
    Conv,
    Dynamic,
    EfficientAttention,
    Gaussian,
    Linear,
    Linformer,
    Max,
    Mean,
    Mechanism,
    Softmax,
    TokenGrid,
    Verma,
)
from longseq.attention.heads import Heads
from longseq.attention.layer import softmax_formula
from longseq.attention.scaling import scaled_by_length
from longseq.attention.verma import MeanOfTokens, OverTokens

B, N, K, D, H = 2, 24, 5, 12, 3
C = D // H
SHARINGS = ["none", "headwise", "key_value", "layerwise"]
MECHANISMS = [
    Softmax(),
    Softmax(length_scaling=2.0),
    *(Linformer(K, sharing) for sharing in SHARINGS),
    Verma(),
    Verma(length_scaling=1.5),
    *(Verma(K, sharing) for sharing in SHARINGS),
    Verma(normalize="columns"),
    Verma(K, normalize="columns"),
    *(
        kind(K, sharing, projection)
        for kind in (Linformer, Verma)
        for sharing in ("none", "key_value")
        for projection in (Mean(), Max(), Conv(), Conv(full=True), Gaussian())
    ),
    Verma(K, projection=Mean(), normalize="columns"),
    Verma(normalize="scaling"),
    Verma(K, normalize="scaling"),
    Verma(K, "none", Max(), normalize="scaling"),
    EfficientAttention("scaling"),
    Linformer([[3, 5, 7]], "none"),
    Linformer([[3, 5, 7]], "none", Max()),
    Verma([[3, 5, 7]], "none", Conv(full=True)),
]


def shortened(project: torch.nn.Module | None, tokens: Tensor) -> list[Tensor]:
    """Shorten one clip (n, d) to (k, c) per head: multiply by a matrix by hand, call any other projection."""
    if project is None:
        return list(tokens.split(C, dim=1))
    if isinstance(project, torch.nn.ModuleList):  # every head has its own projection
        return [p(head[None])[0] for p, head in zip(project, tokens.split(C, dim=1), strict=True)]
    weight = getattr(project, "weight", None)
    if weight is None:
        return list(project(tokens[None])[0].split(C, dim=1))
    return [(weight[i] if weight.ndim == 3 else weight) @ head for i, head in enumerate(tokens.split(C, dim=1))]


def naive(layer: torch.nn.Module, mechanism: Mechanism, x: Tensor) -> Tensor:
    """Compute one clip and one head at a time, with products in the paper's order and biases before the projection."""
    weights, bias = layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)
    scale = (math.log(N) / math.log(1000)) ** getattr(mechanism, "length_scaling", 0)
    clips = []
    for clip in x:
        q, k, v = (clip @ w.T + b for w, b in zip(weights, bias, strict=True))
        heads = []
        for Q, K_, V in zip(
            q.split(C, dim=1), shortened(layer.project_keys, k), shortened(layer.project_values, v), strict=True
        ):
            if getattr(mechanism, "normalize", "") == "scaling":
                heads.append((Q / len(K_) ** 0.5) @ (K_.T / len(K_) ** 0.5) @ V)
            elif isinstance(mechanism, Verma):
                axis = 1 if mechanism.normalize == "rows" else 0
                H_ = torch.softmax(Q / C**0.5, dim=axis)
                L = torch.softmax(scale * K_.T / C**0.5, dim=axis)
                heads.append((H_ @ L) @ V)
            else:
                heads.append(torch.softmax(scale * Q @ K_.T / C**0.5, dim=1) @ V)
        clips.append(torch.cat(heads, dim=1))
    return torch.stack(clips) @ layer.proj.weight.T + layer.proj.bias


def layer_of(mechanism: Mechanism) -> torch.nn.Module:
    torch.manual_seed(0)
    attention = Attention(D, num_heads=H, qkv_bias=True)
    (layer,) = mechanism.layers([attention], TokenGrid((4, N // 4)))
    layer = layer.double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)  # biases too: the claim includes their row sums
    return layer


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_value_and_gradients_are_those_of_the_papers_formula(mechanism: Mechanism) -> None:
    layer = layer_of(mechanism)
    x = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(B, N, D, dtype=torch.float64)
    inputs = [x, *layer.parameters()]

    ours, papers = layer(x), naive(layer, mechanism, x)
    torch.testing.assert_close(ours, papers, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(papers, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", [Linformer(K, "headwise"), Verma(K, "key_value"), Verma(K, projection=Mean())])
def test_shortening_before_and_after_the_projection_agree(mechanism: Mechanism, monkeypatch) -> None:
    layer = layer_of(mechanism)
    x = torch.randn(B, N, D, dtype=torch.float64)
    early = layer(x)
    for projection in (layer.project_keys, layer.project_values):
        monkeypatch.setattr(projection, "commutes", False)
    torch.testing.assert_close(early, layer(x), rtol=1e-10, atol=1e-10)


def test_the_product_over_tokens_has_gradients_that_lie_token_by_token_and_gradients_of_those() -> None:
    torch.manual_seed(0)
    L, x = (torch.randn(2, 7, width, dtype=torch.float64, requires_grad=True) for width in (3, 5))
    assert torch.autograd.gradcheck(OverTokens.apply, (L, x))
    assert torch.autograd.gradgradcheck(OverTokens.apply, (L, x))
    gradients = torch.autograd.grad(OverTokens.apply(L, x).square().sum(), (L, x))
    assert all(gradient.is_contiguous() for gradient in gradients)
    part = torch.func.vmap(torch.func.grad(lambda *pair: OverTokens.apply(*pair).square().sum(), (0, 1)))(L, x)
    torch.testing.assert_close(part, gradients)


@pytest.mark.parametrize("is_padded", [False, True])
def test_means_of_tokens_have_the_derivatives_of_a_softmax_and_a_product(is_padded: bool) -> None:
    torch.manual_seed(0)
    scores, x = (torch.randn(2, 6, width, dtype=torch.float64, requires_grad=True) for width in (3, 4))
    present = (torch.arange(6) < torch.tensor([[6], [4]]))[..., None] if is_padded else None

    def plain(scores: Tensor, x: Tensor) -> Tensor:
        return (scores if present is None else scores.masked_fill(~present, -float("inf"))).softmax(1).mT @ x

    cotangent = torch.randn(2, 3, 4, dtype=torch.float64)
    results = []
    for form in (plain, lambda *inputs: MeanOfTokens.apply(*inputs, present)[0]):
        first = torch.autograd.grad(form(scores, x), (scores, x), cotangent, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (scores, x))
        results.append([form(scores, x), *first, *second])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_verma_is_efficient_attention_when_nothing_is_shortened() -> None:
    """Shen et al., equation 5, with both scales: softmax of Q over its features, softmax of K over its tokens."""
    torch.manual_seed(0)
    layer = layer_of(Verma())
    x = torch.randn(1, N, D, dtype=torch.float64)
    q, k, v = layer.qkv(x)[0].view(N, 3, H, C).permute(1, 2, 0, 3)
    context = torch.einsum("hnc,hne->hce", (k / C**0.5).softmax(1), v)
    expected = torch.einsum("hnc,hce->nhe", (q / C**0.5).softmax(2), context).reshape(N, D)
    torch.testing.assert_close(layer(x)[0], layer.proj(expected), rtol=1e-10, atol=1e-10)


def test_a_way_to_normalise_that_does_not_exist_is_named_in_one_line() -> None:
    for mechanism, names in (
        (Verma(normalize="row"), "rows, columns or scaling"),  # type: ignore[arg-type]
        (EfficientAttention("rows"), "softmax or scaling"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match=f"^normalize must be {names}, got 'rows?'; choose one of them$"):
            layer_of(mechanism)


@pytest.mark.parametrize(
    "mechanism",
    [m for m in MECHANISMS if getattr(m, "normalize", "rows") == "rows" and getattr(m, "projection", None) == Linear()],
    ids=repr,
)
def test_the_layer_is_a_weighted_mean_of_the_values(mechanism: Mechanism) -> None:
    """If every value is one and the rows of F sum to one, softmax weights that sum to one return one."""
    layer = layer_of(mechanism)
    with torch.no_grad():
        layer.qkv.weight[2 * D :].zero_()
        layer.qkv.bias[2 * D :].fill_(1.0)
        layer.proj.weight.copy_(torch.eye(D))
        layer.proj.bias.zero_()
        for project in (layer.project_values or torch.nn.Module()).modules():
            if hasattr(project, "weight"):
                project.weight /= project.weight.sum(-1, keepdim=True)
    y = layer(torch.randn(B, N, D, dtype=torch.float64))
    torch.testing.assert_close(y, torch.ones_like(y), rtol=1e-9, atol=1e-9)


def test_rows_and_columns_differ_and_only_rows_sum_to_one() -> None:
    torch.manual_seed(2)  # of other draws a sum may lie near one by chance
    x = torch.randn(B, N, D, dtype=torch.float64)
    rows, columns = layer_of(Verma()), layer_of(Verma(normalize="columns"))
    for layer in (rows, columns):
        layer.load_state_dict(rows.state_dict())
        with torch.no_grad():
            layer.qkv.weight[2 * D :].zero_()
            layer.qkv.bias[2 * D :].fill_(1.0)
            layer.proj.weight.copy_(torch.eye(D))
            layer.proj.bias.zero_()
    torch.testing.assert_close(rows(x), torch.ones_like(x))
    assert (columns(x) - 1).abs().min() > 0.01


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_a_padded_clip_gives_what_it_gives_alone(mechanism: Mechanism) -> None:
    layer = layer_of(mechanism)
    clip = torch.randn(1, N - 7, D, dtype=torch.float64)
    batch = torch.cat([clip, torch.randn(1, 7, D, dtype=torch.float64)], dim=1)
    present = (torch.arange(N) < N - 7)[None, None, None]
    alone = layer(clip, attn_mask=present[..., : N - 7])
    torch.testing.assert_close(layer(batch, attn_mask=present)[:, : N - 7], alone, rtol=1e-10, atol=1e-10)


def test_causal_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="is_causal"):
        layer_of(Linformer(K))(torch.randn(1, N, D, dtype=torch.float64), is_causal=True)


def test_with_length_scaling_a_token_that_stands_out_keeps_its_weight_at_any_length() -> None:
    """One key lies 8 above all others. e^8 is 2,981: it has most of the weight among 1,000 tokens, and little among a
    million. Multiplied by log(n) / log(1000) the gap is 16 there, and e^16 is nine million."""
    weights = []
    for n in (1000, 1_000_000):
        scores = torch.zeros(1, n, dtype=torch.float64)
        scores[0, 7] = 8
        weights += [float(part.softmax(1)[0, 7]) for part in (scores, scaled_by_length(scores, n, None))]
    assert weights == pytest.approx([0.749, 0.749, 0.003, 0.899], abs=1e-3)


def test_scores_are_scaled_by_the_tokens_that_are_present() -> None:
    scores = torch.randn(3, 5, 40, dtype=torch.float64)
    counts = torch.tensor([40, 10, 1])
    scaled = scaled_by_length(scores, 40, (torch.arange(40) < counts[:, None])[..., None])
    for count, ours, given in zip(counts.tolist(), scaled, scores, strict=True):
        torch.testing.assert_close(ours, given * math.log(count) / math.log(1000), rtol=1e-12, atol=1e-12)


def test_length_scaling_needs_a_softmax_over_tokens() -> None:
    for normalize in ("columns", "scaling"):
        with pytest.raises(ArgumentError, match=f"^length_scaling must be 0 with normalize {normalize}; L is no"):
            layer_of(Verma(normalize=normalize, length_scaling=1.0))
    for power in (-1.0, math.inf, math.nan):
        for mechanism in (Verma(length_scaling=power), Softmax(power), Linformer(K, projection=Dynamic(False, power))):
            with pytest.raises(ArgumentError, match="length_scaling"):
                layer_of(mechanism)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("k", [7, 60])
def test_scores_that_are_written_out_in_bfloat16_are_near_float64(k: int, is_padded: bool) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (60, k, k)]
    low = [part.detach().bfloat16().requires_grad_() for part in exact]
    mask = (torch.arange(k) < torch.tensor([[k], [k // 2]]))[:, None, None] if is_padded else None
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, attn_mask=mask)
    result = softmax_formula(Heads(*low, key_mask=mask))
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), expected, rtol=0.03, atol=0.03)
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(result, low, cotangent.bfloat16())
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, exact, cotangent), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.05, atol=0.05)
