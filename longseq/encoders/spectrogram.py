"""Sound as sequences: one token per spectrogram frame, or per patch of mels and frames."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torchaudio.functional import mask_along_axis_iid, melscale_fbanks
from torchaudio.transforms import MelSpectrogram

from longseq.arguments import ArgumentError, require, require_positive
from longseq.attention import Mechanism
from longseq.compat.torch import without_autocast
from longseq.encoders.encoder import Encoder
from longseq.encoders.pretrained_stem import Pretrained
from longseq.encoders.sound import SoundEncoder, padded_clips, rows_of_patches
from longseq.encoders.stem import Residual, refuse_stem
from longseq.encoders.trunk import Sizes, make_trunk

_FRAMES = 1 << 15  # frames whose spectrum is computed at a time


class SpecAugment(nn.Module):
    """Set random bands of mels and of frames to the mean of the training set, different ones in each sample.

    Source: Park et al., SpecAugment (arXiv:1904.08779), without its time warping.

    Args:
        mel_masks: How many bands of mels.
        mels: Largest width of such a band, in mels.
        frame_masks: How many bands of frames.
        frames: Largest width of such a band, in frames.
        fraction: Largest share of the frames of a batch's longest spectrogram that a band of frames covers.

    Raises:
        ValueError: If a number is negative, or the fraction is not in 0..1.
    """

    def __init__(
        self, mel_masks: int = 1, mels: int = 8, frame_masks: int = 1, frames: int = 20, fraction: float = 0.2
    ) -> None:
        super().__init__()
        for name, value in {"mel_masks": mel_masks, "mels": mels, "frame_masks": frame_masks, "frames": frames}.items():
            require(value >= 0, name, f"must not be negative, got {value}; 0 turns it off")
        require(0 < fraction <= 1, "fraction", f"must be in 0..1 (0 excluded), got {fraction}; 0.2 is a fifth")
        self.mel_masks, self.mels, self.frame_masks, self.frames = mel_masks, mels, frame_masks, frames
        self.fraction = fraction

    def forward(self, picture: Float[Tensor, "b channels frames mels"]) -> Float[Tensor, "b channels frames mels"]:
        mask = torch.ones_like(picture[:, :1])  # one for all channels: another channel must not show what is hidden
        for _ in range(self.mel_masks):
            mask = mask_along_axis_iid(mask, self.mels + 1, 0.0, axis=3)
        for _ in range(self.frame_masks):
            mask = mask_along_axis_iid(mask, self.frames + 1, 0.0, axis=2, p=self.fraction)
        return picture.masked_fill(mask == 0, 0)


class SpectrogramEncoder(SoundEncoder):
    """A vision transformer over a log-mel spectrogram: waveforms (b, samples) or (b, channels, samples) -> (b, dim).

    The spectrogram is part of the encoder. It is computed for the whole batch, on the batch's device, in float32 even
    if the rest has a lower precision. The input of the trunk is (channels, frames, mels), with time downwards: tokens
    are in the order of time, and a shorter clip has the first ones. A batch is waveforms of one length, or a dictionary
    of ``waveforms``, where shorter ones are followed by silence, and their ``lengths`` in samples. A clip in such a
    batch has the same features as alone.

    Args:
        sample_rate_hz: Samples per second of the waveforms.
        seconds: Length of the longest clip.
        attention: The mechanism of every block.
        num_mels: Mel bands.
        hop_ms: Milliseconds from frame to frame.
        window_ms: Length of a frame's window, in milliseconds.
        tokens: ``frames``, one token per frame, or the size (mels, frames) of a patch.
        spec_augment: Masks bands of mels and of frames in training, different ones in each sample.
        subtract_mean: What is subtracted from a spectrogram. ``level``: its mean, so that loudness makes no difference.
            ``bands``: the mean of each mel band (cepstral mean normalisation), which removes the effect of a microphone
            or a room, and steady sounds. By default nothing. In recordings longer than ``seconds``, the mean is that of
            the ``seconds`` before and after each frame. Each channel has its own.
        channels: The number of channels; a token is a patch of all. The data decides it.
        gaps: Whether NaN stands for a missing sample. The data decides it. A frame all of whose own samples are missing
            is masked (with a stem, its neighbours see zeros there); the spectrum of others has zeros for missing ones.
        sizes: Arguments of ``Sizes``.

    Raises:
        ValueError: If a number is not positive, the patch does not divide the mels, the heads do not divide dim, or the
            mechanism does not fit.
    """

    measured_by = ("sample_rate_hz", "num_mels", "hop_ms", "window_ms", "subtract_mean")

    def __init__(
        self,
        sample_rate_hz: int,
        seconds: float,
        attention: Mechanism,
        num_mels: int = 64,
        hop_ms: float = 10.0,
        window_ms: float = 25.0,
        tokens: Literal["frames"] | Sequence[int] = "frames",
        spec_augment: SpecAugment | None = None,
        subtract_mean: Literal["level", "bands"] | None = None,
        channels: int = 1,
        gaps: bool = False,
        **sizes: Annotated[Any, Sizes],
    ) -> None:
        is_known = subtract_mean in (None, "level", "bands")
        require(is_known, "subtract_mean", f"must be level or bands, got {subtract_mean!r}; leave it out")
        require_positive(sample_rate_hz=sample_rate_hz, seconds=seconds, num_mels=num_mels, channels=channels)
        require_positive(hop_ms=hop_ms, window_ms=window_ms)
        hop, window = (round(sample_rate_hz * ms / 1000) for ms in (hop_ms, window_ms))
        for name, ms, samples in (("hop_ms", hop_ms, hop), ("window_ms", window_ms, window)):
            what = f"must be a sample or more, got {ms} ms at {sample_rate_hz} Hz; lengthen it"
            require(samples >= 1, name, what)
        is_patch = not isinstance(tokens, str) and len(tokens) == 2
        mels, frames = (num_mels, 1) if tokens == "frames" else tokens if is_patch else (0, 0)
        what = f"must be 'frames' or a patch (mels, frames) that divides {num_mels} mels, got {tokens}"
        require(mels >= 1 and frames >= 1 and num_mels % mels == 0, "tokens", f"{what}; [{num_mels}, 4] is one")
        described = Sizes(**sizes)
        if described.stem is not None:
            refuse_stem(described.stem, (frames, mels), "tokens")
        shape = (channels, rows_of_patches(1 + round(sample_rate_hz * seconds) // hop, frames), num_mels)
        statistics = (channels, 1, num_mels)
        trunk = make_trunk(shape, (frames, mels), described, frames * hop / sample_rate_hz)
        super().__init__(trunk, attention, shape, statistics, described)
        self.sample_rate_hz, self.seconds, self.num_mels = sample_rate_hz, seconds, num_mels
        self.hop_ms, self.window_ms = hop_ms, window_ms
        self.tokens = tokens if tokens == "frames" else list(tokens)
        if isinstance(described.stem, Pretrained):
            self.stem = described.stem.without_weights()  # a checkpoint has them
        self.spec_augment, self.subtract_mean, self.channels = spec_augment, subtract_mean, channels
        self.hop, self.gaps = hop, gaps
        self.trunk.has_gaps = gaps
        self.log_mel = LogMel(sample_rate_hz, num_mels, hop, window)

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[Encoder, Any]]":
        small = {"sample_rate_hz": 8000, "seconds": 0.4, "dim": 16, "depth": 2, "heads": 4, **options}
        padded, of_channels = padded_clips(3200, 1000, 90), padded_clips(3200, 1000, 90, channels=2)
        stem = Residual([4, 6], [1, 2])
        return [
            (cls(attention=attention, num_mels=20, **small), padded),
            (cls(attention=attention, num_mels=16, tokens=[8, 4], pool="token", **small), torch.randn(3, 3200)),
            (cls(attention=attention, num_mels=20, spec_augment=SpecAugment(), **small), torch.randn(3, 3200)),
            (cls(attention=attention, num_mels=20, tokens=[10, 2], stem=stem, **small), padded),
            (cls(attention=attention, num_mels=20, subtract_mean="bands", **small), padded),
            (cls(attention=attention, num_mels=20, channels=2, **small), of_channels),
        ]

    def front_end(
        self, inputs: Float[Tensor, "b *channels samples"] | Mapping[str, Tensor]
    ) -> Float[Tensor, "b channels frames mels"]:
        waveforms, lost = self.waveforms_of(inputs), None
        if self.gaps:
            missing = waveforms.isnan()
            waveforms, lost = waveforms.masked_fill(missing, 0), self._lost_frames(missing, inputs)
        picture = self.log_mel(waveforms.flatten(0, -2)).mT.unflatten(0, (-1, self.channels))
        if lost is not None:
            picture = picture.masked_fill(lost.view(picture.shape[0], self.channels, -1, 1), float("nan"))
        if self.subtract_mean is None:
            return picture
        means = self._means(picture, self.rows(inputs))
        return picture - (means.mean(3, keepdim=True) if self.subtract_mean == "level" else means)

    def _lost_frames(
        self, missing: Bool[Tensor, "b *channels samples"], inputs: Any
    ) -> Bool[Tensor, "b *channels frames"]:
        """The frames none of whose own samples is there: the hop samples from i hop - 1 for frame i. So a clip of n
        samples has the frames 0..n // hop, as without a gap behind it."""
        if isinstance(inputs, Mapping):  # samples of the padding are not there either
            padding = torch.arange(missing.shape[-1], device=missing.device) >= inputs["lengths"][:, None]
            missing = missing | (padding if missing.ndim == 2 else padding[:, None])
        samples = missing.shape[-1]
        behind = missing.new_ones(*missing.shape[:-1], self.count_rows(samples) * self.hop - samples - 1)
        return torch.cat([missing[..., :1], missing, behind], dim=-1).unflatten(-1, (-1, self.hop)).all(-1)

    def _means(
        self, picture: Float[Tensor, "b channels frames mels"], rows: Int64[Tensor, " b"] | None
    ) -> Float[Tensor, "b channels _ mels"]:
        """The mean of each mel band over the clip; with any_length over the nearby frames of each frame."""
        frame = torch.arange(picture.shape[2], device=picture.device)
        if rows is None:
            rows = frame.new_full((len(picture),), picture.shape[2])
        there = (frame < rows[:, None])[:, None, :, None]
        if self.gaps:
            there = there & ~picture[..., :1].isnan()
        picture = torch.where(there, picture, 0)
        if not self.any_length:
            number = there.sum(2, keepdim=True).clamp(min=1) if self.gaps else rows[:, None, None, None]
            return picture.sum(2, keepdim=True) / number
        reach = self.count_rows(self.num_samples)
        begin = (frame - reach).clamp(min=0)
        end = torch.minimum(frame + reach + 1, rows[:, None])
        sums = F.pad(picture.double(), (0, 0, 1, 0)).cumsum(2)  # an hour's sum in float32 would lose the last seconds
        until_end = sums.gather(2, end[:, None, :, None].expand(-1, *picture.shape[1:2], -1, picture.shape[3]))
        number = (end - begin).clamp(min=1)[:, None, :, None]  # after the clip there are no frames
        if self.gaps:
            counts = F.pad(there[..., 0].long(), (1, 0)).cumsum(2)
            until = counts.gather(2, end[:, None].expand(-1, *counts.shape[1:2], -1))
            number = (until - counts[:, :, begin]).clamp(min=1)[..., None]
        return ((until_end - sums[:, :, begin]) / number).to(picture.dtype)

    def count_rows(self, num_samples: Any) -> Any:
        return 1 + num_samples // self.hop

    @property
    def row_seconds(self) -> float:
        """Seconds from one row of tokens to the next."""
        return self.trunk.patch_embed.patch_size[0] * self.hop / self.sample_rate_hz

    def augment(self, picture: Float[Tensor, "b channels frames mels"]) -> Float[Tensor, "b channels frames mels"]:
        return picture if self.spec_augment is None else self.spec_augment(picture)

    def draw(
        self, pictures: Sequence[Float[Tensor, "channels _ mels"]], names: Sequence[str], limits: Any = None
    ) -> Any:
        from longseq.encoders.drawing import draw_spectrograms  # matplotlib takes half a second to import

        return draw_spectrograms(pictures, names, self.sample_rate_hz, self.hop_ms)


class LogMel(nn.Module):
    """log(mel power + 1e-6) of waveforms, frame i centred on sample i * hop, with silence before and after the clip.

    It is computed in float32, even under mixed precision and in a bfloat16 model; in a float64 model in float64. Only
    the product with the mel filters is in TF32 on a GPU if torch.set_float32_matmul_precision allows it. It sums
    numbers that are not negative, so its error is at most 2^-10 of each mel power, and 0.001 of the logarithm.

    Args:
        sample_rate_hz: Samples per second.
        num_mels: Mel bands up to half the sample rate.
        hop: Samples from frame to frame.
        window: Samples of a frame.
    """

    def __init__(self, sample_rate_hz: int, num_mels: int, hop: int, window: int) -> None:
        super().__init__()
        bins = fft_length(sample_rate_hz, num_mels, window)
        with torch.device("cpu"):  # it checks the values of its filters, and the meta device has none
            mel = MelSpectrogram(
                sample_rate_hz, bins, win_length=window, hop_length=hop, n_mels=num_mels, pad_mode="constant"
            )
        self.mel = mel.to(torch.get_default_device())

    def forward(self, waveforms: Float[Tensor, "b samples"]) -> Float[Tensor, "b mels frames"]:
        spectrogram: Any = self.mel.spectrogram
        bins, hop = spectrogram.n_fft, spectrogram.hop_length
        frames = 1 + waveforms.shape[-1] // hop
        with without_autocast(waveforms):  # torch.fft has no bfloat16
            padded = F.pad(waveforms.to(self._dtype), (bins // 2, bins // 2))
            parts = []
            for begin in range(0, frames, _FRAMES):  # an hour's spectrum would take gigabytes
                end = min(begin + _FRAMES, frames)
                of_part = padded[:, begin * hop : (end - 1) * hop + bins]
                # torchaudio's own function breaks the graph of torch.compile
                spectrum = torch.stft(
                    of_part, bins, hop, spectrogram.win_length, spectrogram.window, center=False, return_complex=True
                )
                real, imaginary = torch.view_as_real(spectrum).unbind(-1)
                power = torch.addcmul(real.square(), imaginary, imaginary)
                parts.append((self.mel.mel_scale(power) + 1e-6).log())
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.mel.buffers()).dtype

    def _apply(self, fn, recurse=True):
        exact = [(part, *named) for part in self.mel.modules() for named in part.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        if self._dtype not in (torch.float32, torch.float64):  # a rounded window would smear every tone
            for part, name, value in exact:
                setattr(part, name, value.to(getattr(part, name).device, torch.float32))
        return self


def fft_length(sample_rate_hz: int, num_mels: int, window: int) -> int:
    """The shortest power of two that holds the window and leaves no mel filter empty.

    Raises:
        ValueError: If no power of two up to 16 windows does.
    """
    length = 1 << max(window - 1, 1).bit_length()
    while length <= 16 * window:
        with torch.device("cpu"):  # the meta device has no values
            filters = melscale_fbanks(length // 2 + 1, 0.0, sample_rate_hz / 2, num_mels, sample_rate_hz)
        if (filters.amax(0) > 0).all():
            return length
        length *= 2
    raise ArgumentError(
        "num_mels", f"must be lower for a window of {window} samples, got {num_mels}; 40 to 80 are usual"
    )
