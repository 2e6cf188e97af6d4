"""Sound as sequences without a spectrogram: one token per sample, or per patch of samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from longseq.arguments import require, require_positive
from longseq.attention import Mechanism
from longseq.compat.torch import at_least_float32
from longseq.encoders.encoder import Encoder
from longseq.encoders.positions import Positions
from longseq.encoders.sound import SoundEncoder, padded_clips, rows_of_patches
from longseq.encoders.trunk import Sizes, make_trunk


@dataclass(frozen=True)
class WaveformSizes(Sizes):
    """The sizes of a WaveformEncoder, which has no stem and no layer scale."""

    dim: int = 64
    depth: int = 4
    mlp_ratio: float = 2.0
    positions: Positions = "none"
    stem: None = field(default=None, init=False)
    layer_scale: float = field(default=0.0, init=False)


class WaveformEncoder(SoundEncoder):
    """A vision transformer over the samples of a waveform: (b, samples) or (b, channels, samples) -> (b, dim).

    A second at 16 kHz is 16,000 tokens, as in S4's experiments on raw Speech Commands (arXiv:2111.00396). A single
    sample means little, so the model needs local mixing. A clip in a padded batch has the same features as alone. A
    token is a patch of all channels; each channel has a mean and a deviation of its own.

    Args:
        sample_rate_hz: Samples per second of the waveforms.
        seconds: Length of the longest clip.
        attention: The mechanism of every block.
        patch_size: Samples of a token; 1 makes every sample a token.
        channels: The number of channels. The data decides it.
        gaps: Whether NaN stands for a missing sample, which is masked. The data decides it.
        sizes: Arguments of ``Sizes`` except ``stem`` and ``layer_scale``, with other defaults.

    Raises:
        ValueError: If a number is not positive, the heads do not divide dim, or the mechanism does not fit.
    """

    measured_by = ("sample_rate_hz",)

    def __init__(
        self,
        sample_rate_hz: int,
        seconds: float,
        attention: Mechanism,
        patch_size: int = 1,
        channels: int = 1,
        gaps: bool = False,
        **sizes: Annotated[Any, WaveformSizes],
    ) -> None:
        require_positive(sample_rate_hz=sample_rate_hz, seconds=seconds, patch_size=patch_size, channels=channels)
        num_samples = round(sample_rate_hz * seconds)
        what = f"must be at most a clip's {num_samples} samples, got {patch_size}; lower it"
        require(num_samples >= patch_size, "patch_size", what)
        shape = (channels, rows_of_patches(num_samples, patch_size), 1)
        described = WaveformSizes(**sizes)
        trunk = make_trunk(shape, (patch_size, 1), described, patch_size / sample_rate_hz)
        super().__init__(trunk, attention, shape, (channels, 1, 1), described)
        self.sample_rate_hz, self.seconds, self.patch_size = sample_rate_hz, seconds, patch_size
        self.channels, self.gaps = channels, gaps
        self.trunk.has_gaps = gaps

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        small = {"sample_rate_hz": 8000, "dim": 16, "depth": 2, "heads": 4, **options}
        padded, of_channels = padded_clips(400, 130, 9), padded_clips(400, 130, 9, channels=3)
        return [
            (cls(seconds=0.05, attention=attention, patch_size=4, **small), padded),
            (cls(seconds=0.004, attention=attention, pool="token", **small), torch.randn(3, 32)),
            (cls(seconds=0.05, attention=attention, patch_size=4, channels=3, **small), of_channels),
        ]

    def count_rows(self, num_samples: Any) -> Any:
        return num_samples

    @property
    def row_seconds(self) -> float:
        return self.patch_size / self.sample_rate_hz

    def front_end(
        self, inputs: Float[Tensor, "b *channels samples"] | Mapping[str, Tensor]
    ) -> Float[Tensor, "b channels samples 1"]:
        waveforms = at_least_float32(self.waveforms_of(inputs))[..., None]
        return waveforms[:, None] if self.channels == 1 else waveforms

    def draw(self, pictures: Sequence[Float[Tensor, "channels _ 1"]], names: Sequence[str], limits: Any = None) -> Any:
        from longseq.encoders.drawing import draw_waveforms  # matplotlib takes half a second to import

        return draw_waveforms([picture[..., 0] for picture in pictures], names, self.sample_rate_hz)
