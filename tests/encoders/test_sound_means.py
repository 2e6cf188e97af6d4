"""The mean of each mel band that is subtracted from a spectrogram, against plain loops."""

import pytest
import torch

from longseq.attention import Verma
from longseq.encoders import SpectrogramEncoder

SMALL = {"sample_rate_hz": 8000, "seconds": 0.4, "num_mels": 20, "dim": 16, "depth": 1, "heads": 4}


def encoder(**options: object) -> SpectrogramEncoder:
    torch.manual_seed(0)
    built = SpectrogramEncoder(attention=Verma(k=None), positions="none", **SMALL, **options)  # type: ignore[arg-type]
    built.set_statistics(torch.zeros(1, 1, 20), torch.ones(1, 1, 20))
    return built.eval()


@pytest.mark.parametrize(("mean", "axes"), [("bands", (0,)), ("level", (0, 1))])
@pytest.mark.parametrize("any_length", [False, True])
def test_a_clip_loses_its_own_mean(any_length: bool, mean: str, axes: tuple[int, ...]) -> None:
    plain, centred = (encoder(any_length=any_length, subtract_mean=kind) for kind in (None, mean))
    lengths = torch.tensor([3200, 1000, 90])
    clips = torch.randn(3, 3200) * (torch.arange(3200) < lengths[:, None])
    inputs = {"waveforms": clips, "lengths": lengths}
    before, after = plain.front_end(inputs), centred.front_end(inputs)
    for clip, length in enumerate(lengths.tolist()):
        rows = 1 + length // 80
        own = before[clip, 0, :rows]
        torch.testing.assert_close(after[clip, 0, :rows], own - own.mean(axes, keepdim=True))


def test_of_a_long_recording_each_frame_loses_the_mean_of_the_frames_that_are_near() -> None:
    plain, centred = (encoder(any_length=True, subtract_mean=kind) for kind in (None, "bands"))
    sound = torch.cat([torch.randn(1, 8000), 100 * torch.randn(1, 16000)], dim=1)
    before, after = plain.front_end(sound)[0, 0], centred.front_end(sound)[0, 0]
    reach = 1 + 3200 // 80
    for frame in range(len(before)):
        near = before[max(frame - reach, 0) : frame + reach + 1]
        torch.testing.assert_close(after[frame], before[frame] - near.mean(0))


@pytest.mark.parametrize("mean", ["bands", "level"])
@pytest.mark.parametrize("any_length", [False, True])
def test_a_louder_clip_has_the_same_features(any_length: bool, mean: str) -> None:
    """Where it is far louder than the logarithm's offset."""
    model, clip = encoder(any_length=any_length, subtract_mean=mean), torch.randn(1, 3000)
    torch.testing.assert_close(model(30 * clip), model(300 * clip), atol=1e-4, rtol=1e-4)
