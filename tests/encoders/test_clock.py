"""A clock: the time of each token, added to it as waves, for inputs of any length."""

import math
from typing import Any

import pytest
import torch

from longseq import ImageEncoder, SpectrogramEncoder, Verma, resize
from longseq.attention import Softmax
from longseq.encoders import FeatureEncoder, Sizes, WaveformEncoder
from longseq.encoders.patches import is_present
from longseq.encoders.positions import clock
from longseq.encoders.sound import padded_clips

FREE: dict[str, Any] = {"any_length": True, "dim": 16, "depth": 1, "heads": 2}


def of_features(positions: str) -> FeatureEncoder:
    torch.manual_seed(0)
    return FeatureEncoder(5, 20, Softmax(), token_seconds=3.0, positions=positions, **FREE).eval()


def of_sounds(kind: type, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(8000, 0.4, Verma(), positions="clock", **{**FREE, **options}).eval()


def test_waves_are_those_of_the_formula_in_float64() -> None:
    table = clock(6, 2, 1800.0, 7, first_row=5)[0]
    assert table.shape == (6, 7) and table.dtype == torch.float32
    for token in range(6):
        seconds = 1800.0 * (5 + token // 2)
        angles = [2 * math.pi * math.log(1 + seconds) / 64 ** (1 - 2 * wave / 3) for wave in range(4)]
        expected = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)][:7])
        torch.testing.assert_close(table[token], expected, rtol=0, atol=1e-6)


def test_neighbouring_seconds_are_told_apart_after_hours_and_time_never_returns() -> None:
    table = clock(36_000, 1, 1.0, 64)[0].double()
    assert (table[1:] - table[:-1]).norm(dim=1).min() > 5e-3
    assert (table[:, 0].diff() > 0).all()


def test_the_order_of_two_tokens_changes_features_with_the_clock_alone() -> None:
    tokens = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0))
    for positions, differs in (("clock", True), ("none", False)):
        encoder = of_features(positions)
        with torch.no_grad():
            first, second = encoder(tokens), encoder(tokens.flip(1))
        assert (float((first - second).abs().max()) > 1e-3) == differs
        if not differs:
            torch.testing.assert_close(first, second)


@pytest.mark.parametrize("pool", ["avg", "token"])
def test_a_clip_in_a_padded_batch_has_the_features_that_it_has_alone(pool: str) -> None:
    features, lengths = torch.randn(3, 30, 5), torch.tensor([30, 7, 1])
    bags = {"features": features * is_present(lengths, 30)[..., None], "lengths": lengths}
    pooled = FeatureEncoder(5, 20, Softmax(), token_seconds=3.0, positions="clock", pool=pool, **FREE).eval()
    with torch.no_grad():
        alone = torch.cat([pooled(bags["features"][[i], : int(n)]) for i, n in enumerate(lengths)])
        torch.testing.assert_close(pooled(bags), alone, rtol=1e-4, atol=1e-5)
    clips = padded_clips(5200, 1000, 90)
    for encoder in (
        of_sounds(SpectrogramEncoder, num_mels=16, tokens=[8, 4]),
        of_sounds(WaveformEncoder, patch_size=4),
    ):
        with torch.no_grad():
            alone = torch.cat([encoder(clips["waveforms"][[i], : int(n)]) for i, n in enumerate(clips["lengths"])])
            torch.testing.assert_close(encoder(clips), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SpectrogramEncoder, {"num_mels": 16, "tokens": [8, 4]}), (WaveformEncoder, {"patch_size": 4})],
)
def test_a_sounds_tokens_have_the_times_of_their_rows(kind: type, options: dict[str, Any]) -> None:
    encoder, columns = of_sounds(kind, depth=1, **options), 2 if kind is SpectrogramEncoder else 1
    seen: list[torch.Tensor] = []
    sounds = torch.randn(1, 3200)
    encoder.trunk.norm_pre = torch.nn.Identity()
    encoder.trunk.norm_pre.register_forward_hook(lambda *given: seen.append(given[-1]))
    with torch.no_grad():
        encoder(sounds)
        encoder.trunk.clock_seconds = None
        encoder(sounds)
    n = seen[0].shape[1]
    torch.testing.assert_close(seen[0] - seen[1], clock(n, columns, encoder.row_seconds, 16), rtol=0, atol=1e-5)


def test_a_resize_keeps_the_clock_and_follows_another_hop() -> None:
    encoder = of_sounds(SpectrogramEncoder, num_mels=16)
    longer, finer = resize(encoder, seconds=2.0), resize(encoder, hop_ms=5.0)
    sounds = torch.randn(2, 3200)
    with torch.no_grad():
        assert torch.equal(longer(sounds), encoder(sounds))
    assert (encoder.trunk.clock_seconds, finer.trunk.clock_seconds) == (0.01, 0.005)
    assert longer.positions == "clock" and longer.state_dict().keys() == encoder.state_dict().keys()


def test_what_has_no_time_has_no_clock() -> None:
    with pytest.raises(ValueError, match=r"^positions must not be clock for tokens without a time, got clock; "):
        ImageEncoder((1, 8, 8), Verma(), positions="clock")
    with pytest.raises(ValueError, match=r"^positions must not be clock"):
        FeatureEncoder(5, 20, Softmax(), positions="clock")
    with pytest.raises(ValueError, match=r"^positions must be none or clock for inputs of any length, got 'sincos'"):
        Sizes(positions="sincos", any_length=True)
    encoder = of_features("clock")
    encoder.trunk.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^trunk must have no hooks for .*; hook into the encoder or its blocks"):
        encoder(torch.randn(1, 4, 5))
