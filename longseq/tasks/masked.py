"""Pretraining without labels: hide tokens, and predict their content."""

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torchmetrics import Metric

from longseq.arguments import ArgumentError, SettingError, require
from longseq.attention.shard import Shard, Split, summed
from longseq.compat.torch import at_least_float32
from longseq.encoders.encoder import Encoder
from longseq.encoders.forward_pass import count_tokens, encode_tokens
from longseq.encoders.patches import count_columns, count_rows, patches_of, stride_of, without_padding
from longseq.encoders.stem import StemEmbed
from longseq.tasks.mean_loss import MeanLoss
from longseq.tasks.pooling import Pool, Pooling
from longseq.tasks.task import Answer, Task


class Masked(Task):
    """Hide a share of each sample's tokens, and predict their pixels or frames. Labels are not used: samples are not
    mixed, and class weights and label smoothing have no effect. SpecAugment is off, because it would hide the targets.

    A hidden token is replaced by a learned vector, and keeps its position. The loss is the mean absolute error of the
    hidden numbers, normalised like the encoder's inputs. A classifier can start from a model that was pretrained in
    this way on the same training set: ``fit --model.init_from CKPT`` (arXiv:2310.02980).

    The outputs are (b, n, 2 p + 1) for patches of p numbers: the prediction, the target, and 1 if the patch was hidden.
    If several processes share a sequence, each has the outputs of its own tokens, and errors are summed over processes.

    Args:
        share: The share of tokens that are hidden.
        span: The number of neighbouring tokens that are hidden together; fewer than an input has. In an input of two
            spans or more, at least one span is hidden and at least one is not.
        metrics: Must be None, because metrics (Task) are of classes.

    Raises:
        ValueError: If the share is not between 0 and 1, the span is not positive, or there are metrics.
    """

    best: ClassVar[str] = "l1"
    mode: ClassVar[Literal["max", "min"]] = "min"
    predicts: ClassVar[None] = None
    fewest: ClassVar[int] = 1  # data without labels lie in one folder
    is_by_token: ClassVar[bool] = True

    def __init__(self, share: float = 0.5, span: int = 1, metrics: dict[str, Any] | None = None) -> None:
        super().__init__(metrics)
        what = f"must be in 0..1 (both excluded), got {share}; 0.5 hides every second token"
        require(0 < share < 1, "share", what)
        require(span >= 1, "span", f"must be 1 or more, got {span}; 1 hides each token by itself")
        what = f"must be absent: they are of classes, and Masked predicts none, got {', '.join(metrics or ())}"
        require(not metrics, "metrics", f"{what}; leave them out")
        self.share, self.span = share, span

    def head(self, encoder: Encoder, num_classes: int) -> nn.Module:
        rows, columns = encoder.trunk.patch_embed.patch_size
        if isinstance(encoder.trunk.patch_embed, StemEmbed) or stride_of(encoder.trunk.patch_embed) != (rows, columns):
            what = "must not be Masked where patches overlap or have a stem: a hidden patch is seen in its neighbours"
            raise ArgumentError("task", f"{what}; train with labels")
        num_tokens = encoder.trunk.patch_embed.num_patches
        what = f"must be smaller than the number of tokens, {num_tokens}, got {self.span}; 1 hides each token by itself"
        require(self.span < num_tokens, "task.span", what)
        if isinstance(encoder.trunk.attn_pool, nn.Module):  # DistributedDataParallel wants a gradient of each weight
            encoder.trunk.attn_pool.requires_grad_(False)
        return _Rebuilder(encoder.dim, encoder.picture_shape[0] * rows * columns)

    def pooling(self, encoder: Any, pool: Pool | None) -> None:
        """Nothing is pooled; the classifier that starts from this model may pool as it likes."""

    def outputs(
        self, encoder: Any, head: Any, inputs: Any, pooling: Pooling | None = None
    ) -> Float[Tensor, "b n numbers"]:
        picture, rows = encoder.prepared(inputs, is_augmented=False)  # SpecAugment would hide the targets
        trunk = encoder.trunk
        embed: Any = trunk.patch_embed
        num_tokens = embed.num_patches
        if not embed.strict_img_size:  # inputs of any size
            num_tokens = count_rows(embed, picture.shape[2]) * count_columns(embed, picture.shape[3])
        counts = torch.full((len(picture),), num_tokens, device=picture.device)
        if rows is not None:
            counts = count_tokens(trunk, rows) - trunk.num_prefix_tokens
            picture = without_padding(picture, rows)
        hidden = self._hidden(counts, num_tokens, encoder.training)
        tokens, present = encode_tokens(trunk, picture, rows, replaced=(hidden, head.hidden_token))
        if encoder.gaps:
            picture = picture.nan_to_num()
        prefix = trunk.num_prefix_tokens
        tokens = trunk.fc_norm(tokens[:, prefix:])
        first = 0 if self.shard is None else max(self.shard.first - prefix, 0)
        last = first + tokens.shape[1]
        targets = patches_of(picture, *embed.patch_size)
        missing = last - targets.shape[1]  # the last patch of a sound may extend beyond its end
        targets = torch.nn.functional.pad(targets, (0, 0, 0, missing))[:, first:]
        counted = hidden[:, first:last]
        if present is not None:
            counted = counted & present[:, prefix:]
        return torch.cat([head(tokens).to(targets.dtype), targets, counted[..., None].to(targets.dtype)], dim=-1)

    def _hidden(self, counts: Int64[Tensor, " b"], tokens: int, is_training: bool) -> Bool[Tensor, "b n"]:
        """Which tokens are hidden: random ones in each training batch. In an evaluation they follow from the length of
        the sample alone.

        Args:
            counts: The number of tokens of each sample before its padding.
            tokens: n, with padding.
            is_training: Whether this is a training.
        """
        spans, own_spans = -(-tokens // self.span), -(-counts // self.span)
        if is_training:
            drawn = torch.rand(len(counts), spans, device=counts.device)
        else:  # independent of the batch
            drawn = torch.ones(len(counts), spans, device=counts.device)
            for number in own_spans.unique().tolist():
                generator = torch.Generator().manual_seed(0)
                drawn[own_spans == number, :number] = torch.rand(number, generator=generator).to(drawn)
        is_padding = torch.arange(spans, device=counts.device) >= own_spans[:, None]
        ranks = drawn.masked_fill(is_padding, 1).argsort(dim=1).argsort(dim=1)  # padding last: others are below 1
        number = (self.share * own_spans.double()).round().minimum(own_spans - 1).clamp(min=1)
        return (ranks < number[:, None]).repeat_interleave(self.span, dim=1)[:, :tokens]

    def targets(self, labels: Tensor, num_classes: int) -> Tensor:
        return torch.zeros(len(labels), num_classes, device=labels.device)  # unused: the inputs are the targets

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor, label_smoothing: float) -> Float[Tensor, ""]:
        errors, counts = _errors(outputs, self.shard)
        return errors.sum() / counts.sum().clamp(min=1)

    def weight(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        rebuilt, _, counted = _parts(outputs.detach())
        return summed(counted.sum() * rebuilt.shape[-1], self.shard)

    def losses(self, outputs: Tensor, labels: Tensor) -> Float[Tensor, " b"]:
        errors, counts = _errors(outputs, self.shard)
        return errors / counts.clamp(min=1)

    def own_metrics(self, num_classes: int) -> dict[str, Metric]:
        return {"l1": _HiddenError()}

    def example(self, num_classes: int) -> None:
        return None

    def probabilities(self, outputs: Tensor) -> Tensor:
        raise SettingError("model.task: Masked predicts no classes; train from it with --model.init_from")

    def answer(self, head: nn.Module, probabilities: Tensor, class_names: list[str]) -> list[Answer]:
        return []

    def names(self, target: Tensor, class_names: list[str]) -> str:
        return class_names[int(target)] if target.ndim == 0 else ""

    def counts(self, labels: Tensor, num_classes: int) -> Tensor:
        return labels.bincount(minlength=num_classes) if labels.ndim == 1 else labels.sum(0)

    def draw(self, encoder: Any, outputs: Float[Tensor, "b n numbers"], most: int = 4) -> Any:
        """Draw some samples of a batch: the input, the input without hidden tokens, and the prediction."""
        rebuilt, targets, counted = _parts(outputs[:most])
        is_hidden = counted[..., None] > 0
        versions = (targets, targets.masked_fill(is_hidden, 0), torch.where(is_hidden, rebuilt, targets))
        pictures = [self._picture(encoder, patches) for sample in zip(*versions, strict=True) for patches in sample]
        return encoder.draw(pictures, ["input", "hidden", "rebuilt"] * len(targets))

    def _picture(self, encoder: Any, patches: Float[Tensor, "n p"]) -> Float[Tensor, "channels height width"]:
        """The picture that consists of these patches, as the encoder's front end returns it."""
        channels, _, width = encoder.picture_shape
        rows, columns = encoder.trunk.patch_embed.patch_size
        grid = patches.unflatten(0, (-1, width // columns)).unflatten(2, (channels, rows, columns))
        picture = grid.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
        return picture.cpu() * encoder.std.cpu() + encoder.mean.cpu()


class _Rebuilder(nn.Module):
    """Predict the p numbers of a patch from its token: W token + b.

    Args:
        dim: d.
        numbers: p.
    """

    def __init__(self, dim: int, numbers: int) -> None:
        super().__init__()
        self.hidden_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.linear = nn.Linear(dim, numbers)

    def forward(self, tokens: Float[Tensor, "*b d"]) -> Float[Tensor, "*b p"]:
        return self.linear(tokens)


class _HiddenError(MeanLoss, Split):
    """The mean absolute error over all hidden numbers."""

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        errors, counts = _errors(outputs, self.shard)
        super().update(errors, counts)


def _parts(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outputs, numbers = at_least_float32(outputs), (outputs.shape[-1] - 1) // 2
    return outputs[..., :numbers], outputs[..., numbers:-1], outputs[..., -1]


def _errors(outputs: Tensor, shard: Shard | None) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """The absolute error of each sample, summed over hidden numbers, and the number of these."""
    rebuilt, targets, counted = _parts(outputs)
    errors = (rebuilt - targets).abs().sum(-1) * counted
    sums = summed(torch.stack([errors.sum(1), counted.sum(1) * rebuilt.shape[-1]]), shard)
    return sums[0], sums[1]
