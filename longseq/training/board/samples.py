"""Samples in TensorBoard: the worst mistakes, attention maps, and features in the projector.

These callbacks need a TensorBoardLogger; with another logger, or none, they do nothing. Under several processes they
show samples of the first.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from longseq.arguments import require_positive
from longseq.encoders.lettering import drawable
from longseq.tasks.task import Answer
from longseq.training.answers.attribution import token_maps
from longseq.training.board.pictures import draw_token_maps, pictures_of
from longseq.training.board.tensorboard import View, add_sound, board_of, show, step_of
from longseq.training.classifier import Classifier
from longseq.training.data import limits_of
from longseq.training.devices.processes import copies


class Mistake(NamedTuple):
    """A sample with a wrong answer.

    Attributes:
        loss: Its loss.
        truth, answer: Its classes, and those of the model's answer.
        title: Both, above its picture.
        picture: What the model sees of it.
        sound: To listen to; None for an image.
    """

    loss: float
    truth: str
    answer: str
    title: str
    picture: Float[Tensor, "channels _ width"]
    sound: Float[Tensor, " samples"] | None


class Mistakes(View):
    """Show the wrong answers with the highest loss: the images val/mistakes and test/mistakes, and those of the test as
    sounds to listen to.

    Args:
        num_samples: The most that are shown. Of each batch as many are examined, those with its highest losses.

    Raises:
        ValueError: If num_samples is not positive.
    """

    def __init__(self, num_samples: int = 8) -> None:
        super().__init__()
        require_positive("8 are usual", num_samples=num_samples)
        self.num_samples = num_samples
        self._worst: list[Mistake] = []

    def begin(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        self._worst = []

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        if board_of(trainer) is None or not trainer.is_global_zero or model.task.predicts != "classes":
            return
        losses = model.task.losses(seen["outputs"], seen["labels"])
        highest = losses.topk(min(self.num_samples, len(losses)))
        for loss, place in zip(highest.values.tolist(), highest.indices.tolist(), strict=True):
            if len(self._worst) < self.num_samples or loss > self._worst[-1].loss:
                sample = tree_map(lambda part, at=place: part[at : at + 1].clone(), (batch[0], dict(seen)))
                self._keep(model, loss, *sample)

    def end(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        self._show(trainer, model, stage)
        board, encoder = board_of(trainer) if stage == "test" else None, cast(Any, model.encoder)
        for number, mistake in enumerate(self._worst):
            if board is not None and mistake.sound is not None:
                truth, answer = (re.sub(r"\W", "", name) for name in (mistake.truth, mistake.answer))
                tag = f"mistakes/{number}_{truth}_taken_for_{answer}"
                add_sound(board, tag, mistake.sound, encoder.sample_rate_hz, step_of(trainer))

    def _keep(self, model: Classifier, loss: float, inputs: Any, seen: Mapping[str, Tensor]) -> None:
        """Keep a sample, given as a batch of one, if its answer is wrong."""
        task, names, label = model.task, model.class_names, seen["labels"]
        (chances,) = seen["predicted"].cpu()
        (shares,) = task.targets(label, model.num_classes).tolist()
        answers = task.answer(model.head, chances, names)
        right = {name for name, share in zip(names, shares, strict=True) if share > 0.5}
        if {answer.class_name for answer in answers} == right:
            return
        (picture,), sounds = pictures_of(model, inputs), model.encoder.sounds(inputs)
        truth, answer = task.names(label[0].cpu(), names), _written(answers)
        drawn = drawable(names)
        title = f"{task.names(label[0].cpu(), drawn)} →\n{_written(task.answer(model.head, chances, drawn))}"
        self._worst.append(Mistake(loss, truth, answer, title, picture, sounds[0].cpu() if sounds else None))
        self._worst = sorted(self._worst, key=lambda mistake: -mistake.loss)[: self.num_samples]

    def _show(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        if self._worst:
            titles = [mistake.title for mistake in self._worst]
            pictures = [mistake.picture for mistake in self._worst]
            show(trainer, f"{stage}/mistakes", lambda: model.encoder.draw(pictures, titles, limits_of(trainer)))


def _written(answers: Sequence[Answer]) -> str:
    named = [f"{class_name} {probability:.2f}" for class_name, probability in answers]
    return ", ".join(named[:2] + ["..."] * (len(named) > 2)) or "no class"  # more would not fit above a picture


class AttentionMaps(View):
    """Show every few epochs what the attention looks at in the first sample of the validation. The image val/attention
    is the share of each token in the mean of a block's outputs. The image val/summary_tokens is what some summary
    tokens look at: rows of E, or of L for Verma without E.

    Args:
        every_n_epochs: How often; also after the last of max_epochs.
        blocks: The most blocks, spread evenly over all.

    Raises:
        ValueError: If a number is not positive.
    """

    def __init__(self, every_n_epochs: int = 5, blocks: int = 6) -> None:
        super().__init__()
        require_positive("5 is usual", every_n_epochs=every_n_epochs, blocks=blocks)
        self.every_n_epochs, self.blocks = every_n_epochs, blocks

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        epoch = trainer.current_epoch
        is_wanted = epoch % self.every_n_epochs == 0 or epoch + 1 == trainer.max_epochs
        if number or trainer.testing or not is_wanted or board_of(trainer) is None:
            return
        if copies(trainer) > 1 or isinstance(model, FSDPModule):  # a process sees some tokens, or parts of weights
            return
        with torch.inference_mode(False):  # the maps are gradients
            first = tree_map(lambda part: part[:1].clone(), batch[0])
            maps = token_maps(model, first, self.blocks)
        chosen = {f"block {number + 1}": of_block for number, of_block in maps.items()}
        means = {name: of_block.mean[None].cpu() for name, of_block in chosen.items()}
        rows = {name: of_block.summaries.cpu() for name, of_block in chosen.items() if len(of_block.summaries)}
        for tag, pictures in {"attention": means, "summary_tokens": rows}.items():
            if pictures:
                show(trainer, f"val/{tag}", partial(draw_token_maps, pictures, model.encoder.row_seconds))


class Embeddings(View):
    """Show the features of the last validation in the projector when a training ends, with class, answer and, for
    images, a thumbnail. Where scores of tokens are pooled, an input has no features, and nothing is shown.

    Args:
        num_samples: The most samples.

    Raises:
        ValueError: If num_samples is not positive.
    """

    def __init__(self, num_samples: int = 1000) -> None:
        super().__init__()
        require_positive("1000 are usual", num_samples=num_samples)
        self.num_samples = num_samples
        self._rows: list[tuple[Tensor, list[list[str]], Tensor | None]] = []
        self._features: Tensor | None = None
        self._hook: Any = None

    def begin(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        if stage == "test":
            return
        self._rows, self._features = [], None
        self._unhook()
        is_shown = board_of(trainer) is not None and trainer.is_global_zero
        if is_shown and model.pooling is None and model.task.predicts == "classes":
            self._hook = model.head.register_forward_pre_hook(self._see)

    def see(self, trainer: pl.Trainer, model: Classifier, seen: Mapping[str, Tensor], batch: Any, number: int) -> None:
        wanted = self.num_samples - sum(len(names) for _, names, _ in self._rows)
        if self._hook is None or self._features is None or wanted <= 0:
            return
        task, names = model.task, model.class_names
        answers = [task.answer(model.head, row, names) for row in seen["predicted"][:wanted].cpu()]
        texts = [
            [task.names(label, names), ", ".join(named.class_name for named in answer)]
            for label, answer in zip(seen["labels"][:wanted].cpu(), answers, strict=True)
        ]
        thumbnails = None
        if model.encoder.kind == "images":
            thumbnails = _thumbnails(batch[0][:wanted], limits_of(trainer))
        self._rows.append((self._features[:wanted].float().cpu(), texts, thumbnails))

    def end(self, trainer: pl.Trainer, model: Classifier, stage: str) -> None:
        self._unhook()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        board = board_of(trainer)
        if board is None or not self._rows:
            return
        features, texts, thumbnails = zip(*self._rows, strict=True)
        board.experiment.add_embedding(
            torch.cat(features),
            [
                [" ".join(name.split()) for name in names] for of_batch in texts for names in of_batch
            ],  # a tab ends a column
            None if thumbnails[0] is None else torch.cat(thumbnails),
            step_of(trainer),
            "validation",
            metadata_header=["class", "answer"],
        )

    def _see(self, head: torch.nn.Module, arguments: Any) -> None:
        self._features = arguments[0].detach()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _thumbnails(
    images: Shaped[Tensor, "b channels _ _"], limits: tuple[float, float] | None
) -> Float[Tensor, "b 3 24 24"]:
    """Images as small ones of 0..1, grey unless they have three channels."""
    small = F.interpolate(images.float(), (24, 24), mode="area")
    low, high = (float(end) for end in (small.aminmax() if limits is None else limits))
    small = (small - low) / max(high - low, 1e-30)
    return (small if small.shape[1] == 3 else small[:, :1].expand(-1, 3, -1, -1)).cpu()
