"""Encoders that are bound to no length take inputs of any size, and give what an encoder built for that size gives."""

import dataclasses

import pytest
import test_every_encoder as contract
import torch
from test_local import learn
from torch import nn

from longseq import ImageEncoder, Linformer, Softmax, SpectrogramEncoder, Verma, WaveformEncoder
from longseq.arguments import ArgumentError
from longseq.attention import Conv, Dynamic, Gaussian, Linear, Max, Mean, Separable
from longseq.attention.examples import every_mechanism
from longseq.encoders import Conv1d, Conv2d, spectrogram
from longseq.encoders.spectrogram import LogMel

FREE = [mechanism for mechanism in every_mechanism() if mechanism.any_length]
SECONDS = [1.2, 1.1, 0.5, 0.09]


def sounds(mechanism, seconds: float = 0.5, **change) -> SpectrogramEncoder:
    torch.manual_seed(0)
    arguments = {"num_mels": 16, "dim": 16, "depth": 2, "heads": 4, "positions": "none", **change}
    encoder = SpectrogramEncoder(8000, seconds, mechanism, **arguments)
    return learn(encoder).double().eval()


def clips() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, round(8000 * s), dtype=torch.float64, generator=generator) for s in SECONDS]


def padded(waveforms: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(clip.shape[1] for clip in waveforms)
    rows = [nn.functional.pad(clip, (0, longest - clip.shape[1])) for clip in waveforms]
    return {"waveforms": torch.cat(rows), "lengths": torch.tensor([clip.shape[1] for clip in waveforms])}


@pytest.mark.parametrize("tokens", ["frames", [8, 4]], ids=str)
@pytest.mark.parametrize("mechanism", FREE, ids=repr)
def test_a_clip_of_any_length_gives_alone_what_it_gives_in_a_padded_batch(mechanism, tokens) -> None:
    encoder = sounds(mechanism, tokens=tokens, local=Conv2d(), any_length=True)
    together = encoder(padded(clips()))
    alone = torch.cat([encoder(clip) for clip in clips()])
    torch.testing.assert_close(alone, together, rtol=1e-9, atol=1e-9)
    features, present = encoder.token_features(padded(clips()))
    counts = present.sum(1).tolist()
    assert counts == [int(encoder.count_tokens(clip)) for clip in clips()]
    assert int(encoder.count_tokens(padded(clips()))) == sum(counts)
    for clip, row, count in zip(clips(), features, counts, strict=True):
        torch.testing.assert_close(encoder.token_features(clip)[0][0], row[:count], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", [Softmax(), Verma(), Linformer(7, projection=Dynamic())], ids=repr)
def test_it_gives_what_an_encoder_built_for_that_length_gives(mechanism) -> None:
    free, bound = sounds(mechanism, local=Conv1d(5), any_length=True), sounds(mechanism, SECONDS[0], local=Conv1d(5))
    bound.load_state_dict(free.state_dict())
    long = clips()[0]
    torch.testing.assert_close(free(long), bound(long), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("patch_size", [1, 8])
@pytest.mark.parametrize("mechanism", [Verma(), Linformer(7, projection=Dynamic())], ids=repr)
def test_waveforms_of_any_length_are_heard_alone_as_in_a_padded_batch_and_by_an_encoder_of_their_length(
    mechanism, patch_size: int
) -> None:
    def waveforms(seconds: float, **change) -> WaveformEncoder:
        torch.manual_seed(0)
        sizes = {"patch_size": patch_size, "dim": 16, "depth": 2, "heads": 4, "local": Conv1d(5)}
        return learn(WaveformEncoder(8000, seconds, mechanism, **sizes, **change)).double().eval()

    free, bound = waveforms(0.01, any_length=True), waveforms(0.1)
    bound.load_state_dict(free.state_dict())
    heard = [clip[:, :samples] for clip, samples in zip(clips(), (800, 333, 80, 5), strict=True)]
    alone = torch.cat([free(clip) for clip in heard])
    torch.testing.assert_close(alone, free(padded(heard)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(alone[:1], bound(heard[0]), rtol=1e-9, atol=1e-9)
    assert int(free.count_tokens(padded(heard))) == sum(-(-clip.shape[1] // patch_size) for clip in heard)


@pytest.mark.parametrize("pool", ["avg", "token"])
@pytest.mark.parametrize("size", [(12, 8), (6, 20), (4, 4)])
def test_images_of_any_size_give_what_an_encoder_built_for_them_gives(size: tuple[int, int], pool: str) -> None:
    def images(shape, **change):
        torch.manual_seed(0)
        arguments = {"dim": 16, "depth": 2, "heads": 4, "patch_size": 2, "positions": "none", "pool": pool}
        return learn(ImageEncoder(shape, Verma(), local=Conv2d(), **arguments, **change)).double().eval()

    free, bound = images((1, 8, 8), any_length=True), images((1, *size))
    bound.load_state_dict(free.state_dict())
    pictures = torch.rand(2, 1, *size, dtype=torch.float64)
    torch.testing.assert_close(free(pictures), bound(pictures), rtol=1e-10, atol=1e-10)
    assert free.count_tokens(pictures) == bound.count_tokens(pictures)
    with pytest.raises(ArgumentError, match="must be filled by patches"):
        free(torch.rand(2, 1, 9, 8, dtype=torch.float64))


@pytest.mark.parametrize("projection", [Linear(), Separable(), Gaussian()], ids=repr)
@pytest.mark.parametrize("kind", [Linformer, Verma])
def test_a_part_that_is_bound_to_a_length_is_refused_by_its_name(kind, projection) -> None:
    mechanism = kind(7, projection=projection)
    with pytest.raises(ArgumentError, match=rf"{type(projection).__name__} is bound to one") as error:
        sounds(mechanism, any_length=True)
    assert error.value.argument == "attention"
    with pytest.raises(ArgumentError, match=r"positions.*must be none or clock for .* any length, got 'learned'"):
        sounds(Verma(), any_length=True, positions="learned")


def test_a_mechanism_that_says_nothing_is_taken_to_be_bound() -> None:
    @dataclasses.dataclass(frozen=True)
    class Foreign(Softmax):
        any_length = False

    with pytest.raises(ArgumentError, match="Foreign is bound to one"):
        sounds(Foreign(), any_length=True)


@pytest.mark.parametrize("projection", [Mean(), Max(), Conv(), Dynamic()], ids=repr)
def test_windows_keep_their_length_and_grow_in_number(projection) -> None:
    encoder = sounds(Linformer(7, projection=projection), any_length=True)
    shortened = []
    layer = encoder.trunk.blocks[0].attn
    layer.k_norm.register_forward_hook(lambda module, inputs, out: shortened.append(out.shape[-2]))
    encoder(clips()[2]), encoder(clips()[0])
    assert shortened == ([7, 7] if isinstance(projection, Dynamic) else [7, 16])


def test_a_spectrogram_in_parts_is_the_spectrogram(monkeypatch: pytest.MonkeyPatch) -> None:
    log_mel = LogMel(8000, 20, 80, 200).double()
    waveforms = torch.randn(2, 80 * 50 + 17, dtype=torch.float64)
    whole = (log_mel.mel(waveforms) + 1e-6).log()
    torch.testing.assert_close(log_mel(waveforms), whole, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(spectrogram, "_FRAMES", 7)
    torch.testing.assert_close(log_mel(waveforms), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", contract.KINDS, ids=lambda kind: kind.__name__)
def test_token_features_are_those_of_every_token(kind) -> None:
    torch.manual_seed(0)
    for encoder, inputs in kind.examples(Verma()):
        encoder = encoder.double().eval()
        tokens, present = encoder.token_features(inputs)
        count = len(tokens) * encoder.trunk.num_prefix_tokens + (
            tokens.shape[1] * len(tokens) if present is None else present.sum()
        )
        assert int(count) == int(encoder.count_tokens(inputs))
