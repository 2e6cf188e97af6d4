"""The Audio Spectrogram Transformer (arXiv:2104.01778), with weights of a checkpoint of Hugging Face transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int64
from timm.layers.norm import LayerNorm
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from longseq.arguments import require, require_positive
from longseq.attention import Mechanism
from longseq.encoders._ast_weights import read_config, read_weights
from longseq.encoders._kaldi import KaldiLogMel
from longseq.encoders.patches import OverlappingPatchEmbed, without_padding
from longseq.encoders.positions import Positions
from longseq.encoders.sound import SoundEncoder, padded_clips
from longseq.encoders.spectrogram import SpecAugment
from longseq.encoders.trunk import Sizes, make_vit


class ASTTrunk(VisionTransformer):
    """timm's ViT whose features are the mean of its two prefix tokens, the class token and the distillation token."""

    num_pooled = 2

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        return x[:, : self.num_pooled].mean(dim=1)


@dataclass(frozen=True)
class ASTSizes(Sizes):
    """The sizes of an ASTEncoder: the two prefix tokens are pooled, and positions are learned."""

    dim: int = 768
    depth: int = 12
    heads: int = 12
    pool: str = field(default="token", init=False)
    positions: Positions = field(default="learned", init=False)
    any_length: bool = field(default=False, init=False)
    reversible: bool = field(default=False, init=False)
    stem: None = field(default=None, init=False)
    layer_scale: float = field(default=0.0, init=False)


class ASTEncoder(SoundEncoder):
    """An Audio Spectrogram Transformer over overlapping patches of a log-mel spectrogram: (b, samples) -> (b, dim).

    With ``Softmax`` it computes what transformers' ASTForAudioClassification does, up to the last linear layer. A batch
    is waveforms of one length, or a dictionary of ``waveforms``, where shorter ones are followed by silence, and their
    ``lengths``. A clip in such a batch has the same features as alone.

    Spectrograms are normalised by the mean and deviation of the checkpoint (AudioSet's), not by those of the data.
    Tokens are in the order of time. Frames at the end that fill no patch, at most 90 ms, are left out.

    Args:
        sample_rate_hz: Samples per second of the waveforms; for a checkpoint 16,000.
        seconds: Length of the longest clip. Up to the checkpoint's length the first position embeddings are used;
            beyond it they are resampled.
        attention: The mechanism of every block.
        pretrained: A folder that transformers' save_pretrained wrote, or its model.safetensors beside its config.json;
            None for random weights. Its sizes replace those given below.
        num_mels: Mel bands.
        patch_size: Side of a patch, in mels and frames.
        stride_mels: Mels from one patch to the next.
        stride_frames: Frames of 10 ms from one patch to the next.
        fills: Whether clips are filled up to ``seconds`` with frames of zeros that attention does not mask, as in
            transformers; each clip then has as many tokens as the longest. Otherwise it has only its own tokens.
        spec_augment: Masks bands of mels and of frames in training, different ones in each sample.
        sizes: Width, depth and other arguments of ``Sizes``, with the defaults of the checkpoints.

    Raises:
        ValueError: If the checkpoint cannot be read or is of another model, a number is out of its range, or the
            mechanism does not fit.
    """

    def __init__(
        self,
        sample_rate_hz: int,
        seconds: float,
        attention: Mechanism,
        pretrained: str | None = None,
        num_mels: int = 128,
        patch_size: int = 16,
        stride_mels: int = 10,
        stride_frames: int = 10,
        fills: bool = False,
        spec_augment: SpecAugment | None = None,
        **sizes: Annotated[Any, ASTSizes],
    ) -> None:
        require_positive(sample_rate_hz=sample_rate_hz, seconds=seconds)
        mean, std = -4.2677393, 4.5689974  # of AudioSet
        config = None
        if pretrained is not None:
            config = read_config(pretrained)
            num_mels, patch_size = config.num_mels, config.patch_size
            stride_mels, stride_frames = config.stride_mels, config.stride_frames
            sizes |= {"dim": config.dim, "depth": config.depth, "heads": config.heads, "mlp_ratio": config.mlp_ratio}
            mean, std = config.mean, config.std
            rate = config.sample_rate_hz
            what = f"must be the {rate} of the checkpoint, got {sample_rate_hz}; give --data.sample_rate_hz {rate}"
            require(sample_rate_hz == rate, "sample_rate_hz", what)
        require_positive(patch_size=patch_size, stride_mels=stride_mels, stride_frames=stride_frames)
        described = ASTSizes(**sizes)
        fewest = max(4, patch_size)
        require(num_mels >= fewest, "num_mels", f"must be {fewest} or more, got {num_mels}; 128 are usual")
        log_mel = KaldiLogMel(sample_rate_hz, num_mels)
        shape = (1, max(log_mel.count_frames(round(sample_rate_hz * seconds)), patch_size), num_mels)
        norm = partial(LayerNorm, eps=1e-12)
        trunk = make_vit(
            ASTTrunk,
            shape,
            (patch_size, patch_size),
            described,
            reg_tokens=1,  # the distillation token
            embed_layer=partial(OverlappingPatchEmbed, stride=(stride_frames, stride_mels)),
            norm_layer=norm,
        )
        trunk.fc_norm = norm(described.dim)  # that of the checkpoint's classifier
        if config is not None:
            trunk.load_state_dict(read_weights(config, trunk))
        super().__init__(trunk, attention, shape, (1, 1, 1), described)
        self.sample_rate_hz, self.seconds = sample_rate_hz, seconds
        self.num_mels, self.patch_size = num_mels, patch_size
        self.stride_mels, self.stride_frames = stride_mels, stride_frames
        self.fills, self.spec_augment = fills, spec_augment
        self.pretrained = None  # a checkpoint has the weights, so building from it must not read the file
        self.log_mel, self.keeps_statistics = log_mel, True
        self.set_statistics(torch.full((1, 1, 1), mean), torch.full((1, 1, 1), 2 * std))

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[ASTEncoder, Any]]":
        small = {"num_mels": 24, "patch_size": 8, "stride_mels": 6, "stride_frames": 5, **options}
        small = {"sample_rate_hz": 8000, "seconds": 0.4, "dim": 16, "depth": 2, "heads": 4, **small}
        padded = padded_clips(3200, 1000, 90)
        return [(cls(attention=attention, **small), padded)]

    measured_by = ("pretrained",)

    def front_end(self, inputs: Float[Tensor, "b samples"] | Mapping[str, Tensor]) -> Float[Tensor, "b 1 frames mels"]:
        picture = self.log_mel(self.waveforms_of(inputs)).mT[:, None]
        rows, height = super().rows(inputs), self.picture_shape[1] if self.fills else self.patch_size
        if self.fills:
            picture = without_padding(picture, rows)
        return nn.functional.pad(picture, (0, 0, 0, max(height - picture.shape[2], 0)))

    def rows(self, inputs: Float[Tensor, "b samples"] | Mapping[str, Tensor]) -> Int64[Tensor, " b"] | None:
        return None if self.fills else super().rows(inputs)

    def count_tokens(self, inputs: Float[Tensor, "b samples"] | Mapping[str, Tensor]) -> Int64[Tensor, ""] | int:
        return len(self.waveforms_of(inputs)) * self.num_tokens if self.fills else super().count_tokens(inputs)

    def count_rows(self, num_samples: Any) -> Any:
        return self.log_mel.count_frames(num_samples)

    @property
    def row_seconds(self) -> float:
        """Seconds from one row of tokens to the next."""
        return self.stride_frames * self.log_mel.hop / self.sample_rate_hz

    def augment(self, picture: Float[Tensor, "b 1 frames mels"]) -> Float[Tensor, "b 1 frames mels"]:
        return picture if self.spec_augment is None else self.spec_augment(picture)

    def draw(self, pictures: Sequence[Float[Tensor, "1 _ mels"]], names: Sequence[str], limits: Any = None) -> Any:
        from longseq.encoders.drawing import draw_spectrograms  # matplotlib takes half a second to import

        return draw_spectrograms(pictures, names, self.sample_rate_hz, hop_ms=10.0)
