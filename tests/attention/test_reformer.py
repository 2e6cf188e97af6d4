"""Reformer equals transformers' LSH attention with the same rotations, in float64."""

from types import SimpleNamespace

import pytest
import torch
from timm.layers.attention import Attention
from torch.utils.flop_counter import FlopCounterMode
from transformers import ReformerConfig
from transformers.models.reformer import modeling_reformer

from longseq.arguments import ArgumentError
from longseq.attention import Reformer, TokenGrid
from longseq.attention.others.reformer import ReformerLayer

N, D, H = 32, 12, 3


def layer_of(mechanism: Reformer, n: int = N) -> ReformerLayer:
    torch.manual_seed(0)
    (layer,) = mechanism.layers([Attention(D, H)], TokenGrid((n, 1)))
    torch.nn.init.normal_(layer.qkv.weight)
    return layer.double().eval()


@pytest.mark.parametrize("num_padded", [0, 5])
@pytest.mark.parametrize(
    "mechanism",
    [Reformer(1, 8, 1, 1), Reformer(3, 4, 1, 0), Reformer(2, 4, 0, 2), Reformer(3, 8, 0, 0), Reformer(2, 1, 2, 2)],
    ids=repr,
)
def test_values_and_gradients_are_those_of_transformers(
    mechanism: Reformer, num_padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are a ring, in which the last of a round is before the first of the next one. Here chunks of nothing
    but padding are between the two, so it does not show."""
    layer = layer_of(mechanism)
    config = ReformerConfig(
        hidden_size=D, num_attention_heads=H, attention_head_size=D // H, num_hashes=mechanism.rounds,
        num_buckets=list(layer.formula.buckets), lsh_attn_chunk_length=mechanism.chunk, is_decoder=False,
        lsh_num_chunks_before=mechanism.before, lsh_num_chunks_after=mechanism.after,
        lsh_attention_probs_dropout_prob=0.0, hash_seed=None,
    )  # fmt: skip
    same = SimpleNamespace(**{**vars(torch), "randn": lambda *_, **__: layer.formula.rotations})
    monkeypatch.setattr(modeling_reformer, "torch", same)
    theirs = modeling_reformer.LSHSelfAttention(config).double().eval()
    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    present = torch.arange(N) < torch.tensor([[N], [N - num_padded]])
    behind = mechanism.chunk * max(mechanism.before, mechanism.after, 1)
    padded, mask = (torch.nn.functional.pad(t, (0, 0, 0, behind)) for t in (x, present[..., None]))
    of_queries, _, of_values = layer.qkv.weight.chunk(3)
    weights = {"query_key.weight": of_queries, "value.weight": of_values}
    expected = torch.func.functional_call(theirs, weights, (padded, mask[..., 0])).hidden_states[:, :N][present]
    layer.proj = torch.nn.Identity()
    ours = layer(x, present[:, None, None] if num_padded else None)[present]
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    cotangent, inputs = torch.randn_like(ours), [x, layer.qkv.weight]
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_with_one_chunk_it_is_softmax_attention_without_the_token_itself() -> None:
    layer = layer_of(Reformer(2, 64))
    x = torch.randn(2, N, D, dtype=torch.float64)
    Q, _, V = layer.qkv(x).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
    scores = Q @ torch.nn.functional.normalize(Q, dim=-1).mT
    expected = scores.masked_fill(torch.eye(N, dtype=torch.bool), -float("inf")).softmax(-1) @ V
    torch.testing.assert_close(layer(x), layer.proj(expected.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-5)


def test_a_token_alone_attends_to_itself() -> None:
    layer, x = layer_of(Reformer(2, 4)), torch.randn(1, 1, D, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.proj(layer.qkv(x)[..., 2 * D :]))


@pytest.mark.parametrize("mechanism", [Reformer(2, 4), Reformer(1, 8, 2, 0)], ids=repr)
@pytest.mark.parametrize("length", [1, 8, 13])
def test_a_padded_clip_gives_what_it_gives_alone(mechanism: Reformer, length: int) -> None:
    layer = layer_of(mechanism)
    batch = torch.randn(1, N, D, dtype=torch.float64, requires_grad=True)
    padded = layer(batch, (torch.arange(N) < length)[None, None, None])
    torch.testing.assert_close(padded[:, :length], layer(batch[:, :length]), rtol=1e-10, atol=1e-10)
    assert torch.autograd.grad(padded.sum(), batch)[0].isfinite().all()


def test_near_tokens_share_a_bucket_and_opposite_ones_do_not() -> None:
    layer = layer_of(Reformer(64, 4))
    x = torch.randn(1, H, 1, D // H, dtype=torch.float64)
    here, near, opposite = (layer.formula.hashed(y) for y in (x, x + 0.01 * torch.randn_like(x), -x))
    assert (here == near).double().mean() > 0.9 and not (here == opposite).any()


def test_a_layer_is_carried_to_another_number_of_tokens_with_its_seed() -> None:
    old, new = layer_of(Reformer(2, 4)), layer_of(Reformer(2, 4), 4 * N)
    with torch.no_grad():
        old.formula.seed.add_(7)
    assert new.carry(old, TokenGrid((N, 1)), TokenGrid((4 * N, 1))) == []
    assert torch.equal(new.qkv.weight, old.qkv.weight) and new.formula.seed == old.formula.seed
    generator = torch.Generator().manual_seed(int(old.formula.seed))
    expected = torch.randn(new.formula.rotations.shape, generator=generator, dtype=torch.float32)
    assert torch.equal(new.formula.rotations.float(), expected)


def test_costs_are_those_of_the_docstring_and_no_term_has_the_square_of_n() -> None:
    for n, factors in ((256, 32), (2048, 2 * 16), (8192, 2 * 32)):
        layer = layer_of(Reformer(2, 16), n)
        with FlopCounterMode(display=False) as counter:
            layer.to("meta")(torch.empty(1, n, D, device="meta", dtype=torch.float64))
        assert sum(layer.formula.buckets) == factors
        assert counter.get_total_flops() == 6 * n * D * D + n * D * 2 * factors + 4 * n * D * 2 * 16 * 3


@pytest.mark.parametrize("argument", [{"rounds": 0}, {"chunk": 0}, {"before": -1}, {"redraw_every": -1}], ids=str)
def test_what_it_cannot_be_is_named(argument: dict) -> None:
    with pytest.raises(ArgumentError, match=rf"^{next(iter(argument))} must be"):
        layer_of(Reformer(**argument))
