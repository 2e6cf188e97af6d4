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

from longseq.arguments import ArgumentError
from longseq.attention import Mechanism
from longseq.encoders.ast_weights import read_config, read_weights
from longseq.encoders.kaldi import KaldiLogMel
from longseq.encoders.patches import OverlappingPatchEmbed, without_padding
from longseq.encoders.positions import Positions
from longseq.encoders.sound import SoundEncoder, refuse_no_sound
from longseq.encoders.spectrogram import SpecAugment
from longseq.encoders.trunk import Sizes


class ASTTrunk(VisionTransformer):
    """timm's ViT whose features are the mean of its two prefix tokens, the class token and the distillation token."""

    num_pooled = 2

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        return x[:, : self.num_pooled].mean(dim=1)


@dataclass(frozen=True)
class ASTSizes(Sizes):
    """Those of an ASTEncoder: the two prefix tokens are pooled, and positions are learned."""

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
    is waveforms of one length, or a dictionary of ``waveforms``, where silence follows the shorter ones, and their
    ``lengths``. A clip in such a batch gives the features that it gives alone.

    Features are normalised by the mean and deviation of the checkpoint, AudioSet's, and not by the data's. The tokens
    are in the order of time. Frames at the end that fill no patch, at most 90 ms, are left out.

    Args:
        sample_rate_hz: Samples per second of the waveforms; for a checkpoint 16,000.
        seconds: Length of the longest clip. Up to the checkpoint's length the first position embeddings are used;
            beyond it they are resampled.
        attention: The mechanism of every block.
        pretrained: A folder that transformers' save_pretrained wrote, or its model.safetensors beside its config.json;
            None for random weights. Its sizes take the place of those below.
        num_mels: Mel bands.
        patch_size: Side of a patch, in mels and frames.
        stride_mels: Mels from one patch to the next.
        stride_frames: Frames of 10 ms from one patch to the next.
        fills: Whether clips are filled up to ``seconds`` with frames of zeros that the attention sees, as transformers
            does; a clip then has as many tokens as the longest. Otherwise it has its own tokens alone.
        spec_augment: Masks bands of mels and of frames in training, different ones in each sample.
        sizes: Width, depth and what else of ``Sizes`` the model leaves open, with the defaults of the checkpoints.

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
        refuse_no_sound(sample_rate_hz=sample_rate_hz, seconds=seconds)
        mean, std = -4.2677393, 4.5689974  # of AudioSet
        config = None
        if pretrained is not None:
            config = read_config(pretrained)
            num_mels, patch_size = config.num_mels, config.patch_size
            stride_mels, stride_frames = config.stride_mels, config.stride_frames
            sizes |= {"dim": config.dim, "depth": config.depth, "heads": config.heads, "mlp_ratio": config.mlp_ratio}
            mean, std = config.mean, config.std
            if sample_rate_hz != config.sample_rate_hz:
                what = f"must be the {config.sample_rate_hz} of the checkpoint, got {sample_rate_hz}"
                raise ArgumentError("sample_rate_hz", f"{what}; give --data.sample_rate_hz {config.sample_rate_hz}")
        refuse_no_sound(patch_size=patch_size, stride_mels=stride_mels, stride_frames=stride_frames)
        described = ASTSizes(**sizes)
        if num_mels < max(4, patch_size):
            raise ArgumentError("num_mels", f"must be {max(4, patch_size)} or more, got {num_mels}; 128 are usual")
        log_mel = KaldiLogMel(sample_rate_hz, num_mels)
        frames = max(log_mel.count_frames(round(sample_rate_hz * seconds)), patch_size)
        norm = partial(LayerNorm, eps=1e-12)
        trunk = ASTTrunk(
            img_size=(frames, num_mels),
            patch_size=patch_size,
            in_chans=1,
            num_classes=0,
            global_pool="token",
            embed_dim=described.dim,
            depth=described.depth,
            num_heads=described.heads,
            mlp_ratio=described.mlp_ratio,
            class_token=True,
            reg_tokens=1,  # the distillation token
            pos_drop_rate=described.dropout,
            proj_drop_rate=described.dropout,
            drop_path_rate=described.drop_path,
            embed_layer=partial(OverlappingPatchEmbed, stride=(stride_frames, stride_mels)),  # type: ignore[arg-type]
            norm_layer=norm,  # type: ignore[arg-type]
        )
        trunk.fc_norm = norm(described.dim)  # that of the checkpoint's classifier
        if config is not None:
            trunk.load_state_dict(read_weights(config, trunk))
        picture = (1, frames, num_mels)
        super().__init__(trunk, attention, picture, (1, 1, 1), described)
        self.sample_rate_hz, self.seconds = sample_rate_hz, seconds
        self.num_mels, self.patch_size = num_mels, patch_size
        self.stride_mels, self.stride_frames = stride_mels, stride_frames
        self.fills, self.spec_augment = fills, spec_augment
        self.pretrained = None  # a checkpoint holds the weights itself, so building from it must not read the file
        self.log_mel = log_mel
        self.set_statistics(torch.full((1, 1, 1), mean), torch.full((1, 1, 1), 2 * std))

    @classmethod
    def examples(cls, attention: Mechanism, **options: Any) -> "Sequence[tuple[ASTEncoder, Any]]":
        small = {"num_mels": 24, "patch_size": 8, "stride_mels": 6, "stride_frames": 5, **options}
        small = {"sample_rate_hz": 8000, "seconds": 0.4, "dim": 16, "depth": 2, "heads": 4, **small}
        lengths = torch.tensor([3200, 1000, 90])
        padded = torch.randn(3, 3200) * (torch.arange(3200) < lengths[:, None])
        return [(cls(attention=attention, **small), {"waveforms": padded, "lengths": lengths})]

    measured_by = ("pretrained",)

    def measure(self, batches: Any) -> None:
        """Do nothing: the weights expect the mean and deviation that they were trained with."""

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

    def draw(self, pictures: Sequence[Float[Tensor, "1 _ mels"]], names: Sequence[str]) -> Any:
        from longseq.encoders.drawing import draw_spectrograms  # matplotlib takes half a second to import

        return draw_spectrograms([picture[0].T for picture in pictures], names, self.sample_rate_hz, hop_ms=10.0)
