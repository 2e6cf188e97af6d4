"""The features that an encoder makes of its tokens: maximum, mean with learned weights, statistics."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from longseq.attention import NoAttention, Softmax, Verma
from longseq.encoders import FeatureEncoder, ImageEncoder, resize
from longseq.encoders.forward_pass import encode_tokens, pooled, shares
from longseq.encoders.sharding import refuse_unsharded
from longseq.encoders.trunk import Sizes
from longseq.training import Classifier

LENGTHS = [20, 7, 1]


def encoder(pool: str, **options: Any) -> FeatureEncoder:
    torch.manual_seed(0)
    made = FeatureEncoder(5, 20, Verma(), pool=pool, **{"dim": 16, "depth": 2, "heads": 4, **options}).double().eval()
    made.set_statistics(torch.zeros(5, 1, 1), torch.ones(5, 1, 1))
    torch.nn.init.normal_(made.trunk.fc_norm.weight)
    return made


def batch() -> dict[str, Tensor]:
    features = torch.randn(3, 20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for sample, length in zip(features, LENGTHS, strict=True):
        sample[length:] = 0
    return {"features": features, "lengths": torch.tensor(LENGTHS)}


def tokens_of(model: FeatureEncoder) -> list[Tensor]:
    """The tokens that leave the trunk, of each bag alone."""
    inputs = batch()
    alone = [{"features": bag[None, :n], "lengths": torch.tensor([n])} for bag, n in zip(*inputs.values(), strict=True)]
    return [encode_tokens(model.trunk, *model.prepared(one))[0][0] for one in alone]


def naive_weights(model: FeatureEncoder, tokens: Tensor) -> Tensor:
    """The paper's equation 9, a token at a time."""
    pool: Any = model.trunk.attn_pool
    V, U = pool.hidden.weight.chunk(2)
    v, u = pool.hidden.bias.chunk(2)
    (w,) = pool.weight.weight
    scores = []
    for h in tokens:
        x = (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt()
        scores.append(w @ (torch.tanh(V @ x + v) / (1 + torch.exp(-(U @ x + u)))))
    numerators = torch.stack(scores).exp()
    return numerators / numerators.sum()


@pytest.mark.parametrize("depth", [0, 2])
def test_gated_is_the_papers_weighted_mean_of_the_tokens(depth: int) -> None:
    model = encoder("gated", depth=depth)
    expected = []
    for tokens in tokens_of(model):
        weights = naive_weights(model, tokens)
        expected.append(model.trunk.fc_norm(sum(a * h for a, h in zip(weights, tokens, strict=True))))
    torch.testing.assert_close(model(batch()), torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [0, 2])
def test_max_is_the_largest_number_of_each_channel(depth: int) -> None:
    model = encoder("max", depth=depth)
    expected = [model.trunk.fc_norm(torch.tensor([max(c) for c in h.T.tolist()]).double()) for h in tokens_of(model)]
    torch.testing.assert_close(model(batch()), torch.stack(expected), rtol=1e-6, atol=1e-6)


def normed(tokens: Tensor) -> Tensor:
    return torch.stack([(h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt() for h in tokens])


def naive_statistics(model: FeatureEncoder, tokens: Tensor) -> Tensor:
    """Statistics of one channel at a time, then the hidden layer and the norm of the features."""
    hidden, norm = model.trunk.attn_pool.hidden, model.trunk.fc_norm
    means, highest, deviations = [], [], []
    for channel in normed(tokens).T.tolist():
        means.append(sum(channel) / len(channel))
        highest.append(max(channel))
        deviations.append(math.sqrt(sum((x - means[-1]) ** 2 for x in channel) / len(channel) + 1e-6))
    z = hidden.weight @ torch.tensor([*means, *highest, *deviations], dtype=torch.float64) + hidden.bias
    z = z * (1 + torch.erf(z / math.sqrt(2))) / 2
    return norm.weight * (z - z.mean()) / (z.var(unbiased=False) + norm.eps).sqrt() + norm.bias


@pytest.mark.parametrize("depth", [0, 2])
def test_statistics_are_a_hidden_layer_over_mean_maximum_and_deviation(depth: int) -> None:
    model = encoder("statistics", depth=depth)
    expected = torch.stack([naive_statistics(model, tokens) for tokens in tokens_of(model)])
    torch.testing.assert_close(model(batch()), expected, rtol=1e-9, atol=1e-9)
    alone = {"features": batch()["features"][:1], "lengths": torch.tensor([20])}
    torch.testing.assert_close(model(alone["features"]), model(alone), rtol=1e-9, atol=1e-9)  # without a mask
    model(batch()).square().sum().backward()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in model.trunk.attn_pool.parameters()
    )


def test_with_statistics_the_features_of_a_token_are_those_of_an_input_of_it_alone() -> None:
    model = encoder("statistics", depth=0)
    features, present = model.token_features(batch())
    assert present is not None
    for row, there, tokens in zip(features, present, tokens_of(model), strict=True):
        expected = torch.stack([naive_statistics(model, token[None]) for token in tokens])
        torch.testing.assert_close(row[there], expected, rtol=1e-9, atol=1e-9)


def test_statistics_of_tokens_tell_same_from_different_which_pooled_scores_cannot() -> None:
    """Two marks among noise, of two kinds: are they of one kind? Each kind alone says nothing about the answer."""
    torch.manual_seed(0)

    def made(count: int) -> tuple[Tensor, Tensor]:
        features = 0.1 * torch.randn(count, 12, 4)
        kinds = torch.randint(2, (count, 2))
        for sample, pair in zip(features, kinds, strict=True):
            for place, kind in zip(torch.randperm(12)[:2], pair, strict=True):
                sample[place, kind] += 3
        return features, (kinds[:, 0] == kinds[:, 1]).long()

    right = {}
    for pool in ("statistics", "scores"):
        options: Any = {"pool": "statistics"} if pool == "statistics" else {}
        small = FeatureEncoder(4, 12, NoAttention(), dim=16, depth=1, heads=2, **options)
        model = Classifier(small, 2, pool=None if options else "max")
        model.encoder.set_statistics(torch.zeros(4, 1, 1), torch.ones(4, 1, 1))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(150):
            features, labels = made(64)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
        features, labels = made(500)
        right[pool] = float((model.eval()(features).argmax(1) == labels).float().mean())
    assert right["statistics"] > 0.95 and right["scores"] < 0.85


def test_the_share_of_a_token_is_its_weight_or_the_channels_that_it_decides() -> None:
    for pool in ("avg", "gated", "max", "statistics"):
        model = encoder(pool)
        whole = shares(model.trunk, *encode_tokens(model.trunk, *model.prepared(batch())))
        for share, tokens in zip(whole, tokens_of(model), strict=True):
            n = len(tokens)
            expected = torch.full((n,), 1 / n, dtype=torch.float64)
            if pool == "gated":
                expected = naive_weights(model, tokens)
            elif pool == "max":
                expected = torch.tensor([float((tokens.argmax(0) == token).double().mean()) for token in range(n)])
            elif pool == "statistics":
                x = normed(tokens)
                squares = (x - x.mean(0)).square().sum(1)
                maxima = torch.tensor([float((x.argmax(0) == token).double().mean()) for token in range(n)])
                expected = (1 / n + maxima + (squares / squares.sum() if n > 1 else 0)) / 3
            torch.testing.assert_close(share[:n].double(), expected.double(), rtol=1e-6, atol=1e-6)
            assert share[n:].sum() == 0


def test_in_bfloat16_the_weights_of_many_tokens_still_sum_to_one() -> None:
    torch.manual_seed(0)
    pool = encoder("gated").float().trunk.attn_pool
    tokens = 1 + 0.1 * torch.randn(1, 40_000, 16)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, weights = pool(tokens), pool.weights(tokens)
    assert weights.dtype == torch.float32 and abs(weights.sum() - 1) < 1e-4
    torch.testing.assert_close(mixed, pool(tokens), rtol=1e-3, atol=1e-3)


def test_its_products_are_counted() -> None:
    def flops(pool: str) -> int:
        model = encoder(pool).float().to("meta")
        with FlopCounterMode(display=False) as counter:
            pooled(model.trunk, torch.empty(1, 20, 16, device="meta"), None)
        return counter.get_total_flops()

    n, d = 20, 16
    assert flops("gated") == 4 * n * d * d + 2 * n * d + 2 * n * d  # V and U, w, and the weighted sum
    assert flops("statistics") == 2 * 3 * d * d
    assert flops("avg") == 0


def test_a_trained_model_of_another_pool_is_carried_and_the_new_weights_are_named() -> None:
    from longseq.attention import carry

    trained, new = encoder("avg"), encoder("gated")
    fresh = carry(trained.trunk, new.trunk)
    assert sorted(fresh) == [f"attn_pool.{name}" for name in ("hidden.bias", "hidden.weight", "weight.weight")]
    assert sorted(carry(trained.trunk, encoder("statistics").trunk)) == [
        f"attn_pool.hidden.{name}" for name in ("bias", "weight")
    ]
    image = ImageEncoder((1, 8, 8), Softmax(), dim=8, depth=1, heads=2, pool="gated")
    larger = resize(image, (1, 12, 12))
    assert torch.equal(larger.trunk.attn_pool.hidden.weight, image.trunk.attn_pool.hidden.weight)


def test_hooks_of_the_trunk_see_the_same_features() -> None:
    torch.manual_seed(0)
    for pool in ("max", "gated", "statistics"):
        image = ImageEncoder((1, 8, 8), Softmax(), dim=8, depth=1, heads=2, pool=pool).double().eval()
        pixels = torch.randint(0, 256, (2, 1, 8, 8))
        expected = image(pixels)
        image.trunk.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(image(pixels), expected)


def test_what_would_have_no_effect_or_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^pool must be left out if the encoder's pool is gated"):
        Classifier(encoder("gated"), 3, pool="max")
    with pytest.raises(ValueError, match=r"^pool must be left out if the encoder's pool is statistics"):
        Classifier(encoder("statistics"), 3, pool="max")
    with pytest.raises(ValueError, match=r"^depth must be positive without a stem"):
        Sizes(depth=0, pool="gated")
    with pytest.raises(ValueError, match=r"^pool must be avg, gated or token to be shared .*, got max"):
        refuse_unsharded(encoder("max"))
    with pytest.raises(ValueError, match=r"^pool must be avg, gated or token to be shared .*, got statistics"):
        refuse_unsharded(encoder("statistics"))
    refuse_unsharded(ImageEncoder((1, 8, 8), NoAttention(), pool="gated", dim=8, depth=1, heads=2))
