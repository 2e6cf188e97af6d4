"""Synthetic vowels, generated from the formant frequencies that Peterson and Barney measured."""

import math
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from datamodules.audio import AudioDataModule
from datamodules.base import hold_out
from datamodules.errors import require
from datamodules.samples import Clips

# Mean formant frequencies F1, F2, F3 in Hz. G. E. Peterson and H. L. Barney, Control methods used in a study of the
# vowels, J. Acoust. Soc. Am. 24 (1952) 175-184, table II.
#    word       men                women              children
PETERSON_BARNEY_HZ = {
    "heed":  ((270, 2290, 3010), (310, 2790, 3310), (370, 3200, 3730)),   # i
    "hid":   ((390, 1990, 2550), (430, 2480, 3070), (530, 2730, 3600)),   # ɪ
    "head":  ((530, 1840, 2480), (610, 2330, 2990), (690, 2610, 3570)),   # ɛ
    "had":   ((660, 1720, 2410), (860, 2050, 2850), (1010, 2320, 3320)),  # æ
    "hod":   ((730, 1090, 2440), (850, 1220, 2810), (1030, 1370, 3170)),  # ɑ
    "hawed": ((570, 840, 2410), (590, 920, 2710), (680, 1060, 3180)),     # ɔ
    "hood":  ((440, 1020, 2240), (470, 1160, 2680), (560, 1410, 3310)),   # ʊ
    "who'd": ((300, 870, 2240), (370, 950, 2670), (430, 1170, 3260)),     # u
    "hud":   ((640, 1190, 2390), (760, 1400, 2780), (850, 1590, 3360)),   # ʌ
    "heard": ((490, 1350, 1690), (500, 1640, 1960), (560, 1820, 2160)),   # ɝ
}  # fmt: skip
_PITCH_HZ = (132.0, 223.0, 264.0)  # of men, women, children: means over the vowels of the same table
_HIGHER_FORMANTS_HZ = ((3500, 4500), (4100, 5300), (4600, 5900))  # F4 and F5: a tube of 17.5, 15 and 13.3 cm
_BANDWIDTHS_HZ = (60.0, 90.0, 150.0, 200.0, 250.0)

_CLIPS_OF_SPEAKER = 20  # each vowel twice, as each speaker of the study read the list
_CLIPS_OF_TRIPLE = 3 * _CLIPS_OF_SPEAKER  # a man, a woman and a child
_OVERSAMPLING = 2


class Vowels(AudioDataModule):
    """SYNTHETIC speech: ten English vowels of random men, women and children, in noise. No one ever said them.

    A glottal pulse train (Rosenberg's, with jitter and a pitch glide) passes five resonators. F1 to F3 are those of
    Peterson and Barney (1952), table II, changed at random for each speaker (length of the vocal tract), for each vowel
    of a speaker, and for each clip. Pitch, length, place in the clip, level and noise (10 to 40 dB below the voice) are
    random too. A speaker says each vowel twice. No speaker is in two splits, validation included.

    Args:
        num_train: Clips of the training split, validation included: a multiple of 60 (one man, woman and child).
        num_test: Clips of the test split, a multiple of 60.
        sample_rate_hz: Rate of the clips.
        seconds: Length of each clip.
        common: Arguments of AudioDataModule.
    """

    def __init__(
        self,
        num_train: int = 2400,
        num_test: int = 600,
        sample_rate_hz: int = 8000,
        seconds: float = 0.4,
        **common: Any,
    ) -> None:
        super().__init__(sample_rate_hz=sample_rate_hz, seconds=seconds, **common)
        require(seconds >= 0.05, "seconds", "0.05 or more, a few cycles of the voice", seconds, "0.4 is usual")
        for name, value, triples in (("num_train", num_train, 2), ("num_test", num_test, 1)):
            least = triples * _CLIPS_OF_TRIPLE
            rule = f"a multiple of {_CLIPS_OF_TRIPLE} (20 clips each of a man, a woman and a child), {least} or more"
            nearest = max(round(value / _CLIPS_OF_TRIPLE) * _CLIPS_OF_TRIPLE, least)
            require(value >= least and value % _CLIPS_OF_TRIPLE == 0, name, rule, value, f"{nearest} is the nearest")
        self.num_train = num_train
        self.num_test = num_test
        self.class_names = list(PETERSON_BARNEY_HZ)

    def load(self) -> tuple[Clips, None, Clips]:
        generator = torch.Generator().manual_seed(self.seed)
        return self._speak(self.num_train, generator), None, self._speak(self.num_test, generator)

    def split_validation(self, train: Clips) -> tuple[Tensor, Tensor]:
        """Whole speakers are held out, the same share of men, women and children."""
        speakers = torch.arange(len(train)).view(-1, _CLIPS_OF_SPEAKER)
        of_train, of_val = hold_out(torch.arange(len(speakers)) % 3, self.val_fraction, self.seed)
        return speakers[of_train].flatten(), speakers[of_val].flatten()

    def groups_of(self, train: Clips) -> list[str]:
        """The speaker of each clip."""
        return [f"speaker {index // _CLIPS_OF_SPEAKER}" for index in range(len(train))]

    def _speak(self, num_clips: int, generator: torch.Generator) -> Clips:
        clips = [speak(self.shape[0], self.sample_rate_hz, generator) for _ in range(num_clips // _CLIPS_OF_TRIPLE)]
        labels = torch.arange(len(self.class_names)).repeat(num_clips // len(self.class_names))
        return Clips(torch.cat(clips), labels)


def speak(num_samples: int, sample_rate_hz: int, generator: torch.Generator) -> Float32[Tensor, "60 s"]:
    """The clips of a new man, woman and child: each says the ten vowels in the order of the table, twice."""

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=generator)

    def spread(deviation: float, *size: int) -> Tensor:
        """Factors around one; none is further than 2.5 deviations away."""
        return (deviation * torch.randn(size, generator=generator).clamp(-2.5, 2.5)).exp()

    # axes: speaker, take, vowel, formant
    formants = torch.tensor(list(PETERSON_BARNEY_HZ.values())).float().transpose(0, 1)[:, None]
    formants = formants * spread(0.04, 3, 1, 10, 3) * spread(0.02, 3, 2, 10, 3)
    higher = torch.tensor(_HIGHER_FORMANTS_HZ).float()[:, None, None].expand(3, 2, 10, 2)
    formants = (torch.cat([formants, higher], dim=-1) * spread(0.06, 3, 1, 1, 1)).reshape(60, 5)
    pitch = (torch.tensor(_PITCH_HZ)[:, None] * spread(0.12, 3, 1) * spread(0.06, 3, 20)).reshape(60)
    voice = render(pitch, uniform(-0.15, 0.15, 60), formants, num_samples, sample_rate_hz, generator)

    # The envelope: silence, rise, vowel, fall, silence, in fractions of the clip.
    time = torch.arange(num_samples) / num_samples
    length = uniform(0.5, 0.95, 60, 1)
    start = torch.rand(60, 1, generator=generator) * (1 - length)
    rise, fall = ((time - start) / 0.08).clamp(0, 1), ((start + length - time) / 0.15).clamp(0, 1)
    voice = voice / voice.square().mean(dim=1, keepdim=True).sqrt() * rise * fall
    noise = torch.randn(60, num_samples, generator=generator) * 10 ** (-uniform(10.0, 40.0, 60, 1) / 20)
    clips = voice + noise
    return clips / clips.abs().amax(dim=1, keepdim=True) * uniform(0.1, 0.95, 60, 1)


def render(
    pitch_hz: Float[Tensor, " n"],
    glide: Float[Tensor, " n"],
    formants_hz: Float[Tensor, "n f"],
    num_samples: int,
    sample_rate_hz: int,
    generator: torch.Generator,
) -> Float32[Tensor, "n s"]:
    """Source and filter: Rosenberg's pulses through a cascade of resonators, and the lips' differentiation.

    A resonator of frequency F and bandwidth B is F^2 / (F^2 - f^2 + i f B). A source at twice the rate is multiplied
    by the resonators in the frequency domain, and cut off at the Nyquist frequency. So formants may be above that
    frequency, and almost nothing aliases. The filter's tail wraps around into the first 20 ms.

    Args:
        pitch_hz: Mean pitch.
        glide: Change of pitch from the first sample to the last, as a fraction of the mean.
        formants_hz: Frequencies of the resonators, at most five.

    Source: A. E. Rosenberg, Effect of glottal pulse shape on the quality of natural vowels, J. Acoust. Soc. Am. 49
    (1971) 583-590, pulse C.
    """
    num_fine = num_samples * _OVERSAMPLING
    seconds = num_samples / sample_rate_hz
    time = torch.arange(num_fine) / num_fine  # of the clip
    cycles = pitch_hz[:, None] * seconds * (time + glide[:, None] * (time.square() - time) / 2)
    cycles = cycles + torch.rand(len(cycles), 1, generator=generator)
    jitter = 0.01 * torch.randn(len(cycles), int(cycles.max()) + 2, generator=generator)
    whole = cycles.long()
    part = cycles - whole
    cycles = cycles + (1 - part) * jitter.gather(1, whole) + part * jitter.gather(1, whole + 1)

    opening, closing = 0.4, 0.16  # fractions of a cycle; the glottis is closed for the rest
    phase = cycles.remainder(1)
    rising = 0.5 - 0.5 * torch.cos(math.pi * phase / opening)
    falling = torch.cos(math.pi / 2 * (phase - opening) / closing)
    flow = torch.where(phase < opening, rising, torch.where(phase < opening + closing, falling, 0.0))

    hertz = torch.fft.rfftfreq(num_samples, 1 / sample_rate_hz)
    spectrum = torch.fft.rfft(flow)[:, : len(hertz)] * 1j * hertz
    for formant, bandwidth in zip(formants_hz.T[:, :, None], _BANDWIDTHS_HZ, strict=False):
        spectrum = spectrum * formant**2 / (formant**2 - hertz**2 + 1j * hertz * bandwidth)
    return torch.fft.irfft(spectrum, num_samples)
