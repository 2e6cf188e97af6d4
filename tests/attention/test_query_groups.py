"""Groups of queries give the very attention, on a CPU with the number of groups forced."""

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import DEVICE, fake_gpu

from longseq import Linformer
from longseq.attention import query_groups as groups
from longseq.attention.heads import Heads
from longseq.attention.query_groups import attend_in_groups, num_groups
from longseq.encoders import ImageEncoder


def inputs(b: int, n: int, h: int = 3, k: int = 5, c: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    # queries lie token by token, as the layer's
    queries = torch.randn(b, n, h, c, dtype=torch.float64).transpose(1, 2)
    return [queries, *(torch.randn(b, h, k, c, dtype=torch.float64) for _ in range(2))]


def test_groups_are_made_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_processors", lambda index: 132)
    with fake_gpu():
        queries, keys = torch.empty(1, 12, 1 << 18, 64, device=DEVICE), torch.empty(1, 12, 128, 64, device=DEVICE)
        assert groups.groups_for(queries, keys) == 64


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("b", "n", "s"), [(1, 24, 8), (2, 24, 3), (2, 23, 4), (1, 5, 8)])
def test_values_and_gradients_are_those_without_groups(b: int, n: int, s: int, is_masked: bool) -> None:
    mask = torch.arange(5) < torch.tensor([4, 2])[:b, None, None, None] if is_masked else None
    results = []
    for number in (1, s):
        parts = [part.requires_grad_() for part in inputs(b, n)]
        out = attend_in_groups(Heads(*parts, key_mask=mask), number)
        out.mul(torch.arange(out.numel()).view_as(out) / out.numel()).sum().backward()
        results.append([out, *(part.grad for part in parts)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_groups_of_one_sequence_copy_neither_queries_nor_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = inputs(1, 24)
    fused = F.scaled_dot_product_attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        assert len(q) == 8 and q.data_ptr() == queries.data_ptr()
        assert len(k) == 8 and k.data_ptr() == keys.data_ptr()
        return fused(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert attend_in_groups(Heads(queries, keys, values), 8).shape == queries.shape


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 12, 1 << 18, 128, 132), 64),  # 12 blocks without groups, 768 with them
        ((1, 12, 65536, 128, 132), 16),  # no group has fewer than 4,096 queries
        ((1, 12, 4096, 128, 132), 1),
        ((64, 12, 65536, 128, 132), 1),  # the samples of the batch are enough
        ((1, 12, 16384, 16384, 132), 1),  # exact attention has keys enough
        ((1, 12, 65536, 128, 0), 1),
    ],
)
def test_the_number_of_groups_fills_the_processors(sizes: tuple[int, ...], expected: int) -> None:
    assert num_groups(*sizes) == expected


def test_an_encoder_with_groups_gives_the_same_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it compiles in one graph is tested with all layers (compile_every.py)."""
    torch.manual_seed(0)
    encoder = ImageEncoder((1, 6, 6), Linformer(4), dim=8, depth=1, heads=2, pool="token").double().eval()
    images = torch.rand(2, 1, 6, 6)
    expected = encoder(images)
    monkeypatch.setattr("longseq.attention.layer.groups_for", lambda queries, keys: 4)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-12, atol=1e-12)


def test_the_number_of_processors_is_a_constant_under_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compiled = torch.compile(lambda x: x * (groups._processors(0) + 1), backend="eager", fullgraph=True)
    assert compiled(torch.tensor(3.0)) == 3.0
