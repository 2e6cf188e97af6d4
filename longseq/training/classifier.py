"""The LightningModule: an encoder and a linear head, trained with cross entropy."""

import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from jaxtyping import Float
from pytorch_lightning.callbacks import BaseFinetuning, StochasticWeightAveraging
from pytorch_lightning.tuner.lr_finder import _LRCallback
from pytorch_lightning.utilities import rank_zero_warn
from timm.optim import list_optimizers
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from longseq.attention import carry, start_from_inputs
from longseq.encoders import Encoder, SpectrogramEncoder
from longseq.training.checkpoint import CheckpointError, build_from, describe, naming, read_checkpoint
from longseq.training.mean_loss import MeanLoss
from longseq.training.mix import CutMix, Mix
from longseq.training.optimizer import Course, make_optimizer, warmup_cosine
from longseq.training.statistics import measure_inputs, training_inputs


class DivergenceError(Exception):
    """The loss or a weight is no finite number any more; the message says where and what to change."""

    exit_code = 5


class Classifier(pl.LightningModule):
    """Classify images or sounds: logits = W encoder(inputs) + b.

    Batches are ``(inputs, labels)`` with labels (b,) of int64. Logged are loss, accuracy (top 1, over samples) and f1
    (mean over classes) as train/..., val/... and test/....

    Args:
        encoder: Turns inputs into features (b, dim).
        num_classes: Number of classes, 2 or more.
        class_names: Their names, for reports and predictions; numbers if absent.
        optimizer: Any that timm knows, by its name.
        learning_rate: The highest, after warm-up.
        weight_decay: Of matrices only: not of norms, biases, position embeddings and class tokens.
        warmup_fraction: Share of the steps in which the learning rate rises; then it falls along a cosine to 0.
        label_smoothing: Share of the target spread over all classes, in training.
        class_weights: Of each class in the training's loss, or ``balanced``: the rarer a class is, the more a sample of
            it counts, so that all classes count as much. Of mean 1 over the samples of the training set.
        mix: Mixes the samples of a training batch: MixUp or CutMix (mix.py).
        init_from: A checkpoint to start a new training from. Its images may have been of another size, its clips of
            another length: position embeddings and projections are carried over. Its classes may have been others: the
            head then starts anew.
        compile: Whether to compile the encoder, in place: names in checkpoints stay as they are.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        class_names: list[str] | None = None,
        optimizer: str = "adamw",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_fraction: float = 0.1,
        label_smoothing: float = 0.0,
        class_weights: list[float] | Literal["balanced"] | None = None,
        mix: Mix | None = None,
        init_from: str | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be 2 or more, got {num_classes}; one class needs no classifier")
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(
                f"class_names must be num_classes = {num_classes}, got {len(class_names)}; name each class"
            )
        if optimizer not in list_optimizers() or optimizer == "adahessian":  # which needs second derivatives
            raise ValueError(f"optimizer must be one of timm's, got {optimizer!r}; adamw, lamb, lion and sgd are some")
        # an optimizer takes both, and their product, as numbers of 32 bits, which end at 3e38
        if not 0 < learning_rate <= 1e30:
            raise ValueError(
                f"learning_rate must be positive and at most 1e30, got {learning_rate}; 1e-3 is usual for AdamW"
            )
        if not 0 <= weight_decay <= 1e6:
            raise ValueError(f"weight_decay must be in 0..1e6, got {weight_decay}; 0 turns it off")
        for name, value in {"warmup_fraction": warmup_fraction, "label_smoothing": label_smoothing}.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in 0..1 (1 excluded), got {value}; 0 turns it off")
        weights = torch.ones(num_classes)
        if class_weights is not None and class_weights != "balanced":
            are_numbers = not isinstance(class_weights, str) and all(0 < weight < math.inf for weight in class_weights)
            if not are_numbers or len(class_weights) != num_classes:
                raise ValueError(
                    f"class_weights must be {num_classes} positive numbers or balanced, got {class_weights}; "
                    "one a class"
                )
            weights = torch.tensor(class_weights, dtype=torch.float32)
        if isinstance(mix, CutMix) and isinstance(encoder, SpectrogramEncoder):
            raise ValueError("mix must be for sounds, got CutMix; MixUp is")
        # for a training alone, and of no interest to a checkpoint
        self.skip_bad_steps = 0  # how many steps in a row may be left out because their loss is not finite
        self.any_rank: Callable[[bool], bool] = bool  # whether something holds on any rank
        self.of_all_ranks: Callable[[list[str]], list[str]] = list  # what each rank lists, together
        self._bad_steps = 0
        self._planned_for: tuple[float, int | float] | None = None  # the learning rate's course: its peak and its steps
        self.encoder = encoder
        self.num_classes = num_classes
        self.class_names = class_names or [str(label) for label in range(num_classes)]
        self.optimizer, self.learning_rate, self.weight_decay = optimizer, learning_rate, weight_decay
        self.warmup_fraction, self.label_smoothing = warmup_fraction, label_smoothing
        self.class_weights, self.mix = class_weights, mix
        self.register_buffer("loss_weights", weights, persistent=False)
        self.init_from, self._compile = init_from, compile
        self.head = nn.Linear(encoder.dim, num_classes)
        nn.init.zeros_(self.head.weight)  # so that the first loss is log(num_classes), whatever the encoder
        nn.init.zeros_(self.head.bias)
        metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(num_classes, average="micro"),
                "f1": MulticlassF1Score(num_classes, average="macro"),
            }
        )
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")
        self.val_loss, self.test_loss = MeanLoss(), MeanLoss()
        self.save_hyperparameters(describe(self)["init_args"], logger=False)

    @property
    def backbone(self) -> Encoder:
        """The encoder, by the name at which Lightning's BackboneFinetuning looks for what it freezes at first."""
        return self.encoder

    def forward(self, inputs: Any) -> Float[Tensor, "b num_classes"]:
        """Logits of a batch of inputs."""
        return self.head(self.encoder(inputs))

    def setup(self, stage: str) -> None:
        """Before a new training, start from where it should; every rank does the same.

        Raises:
            TypeError: If the data module cannot be described, which a checkpoint must.
        """
        if stage == "fit":
            self._describe_data()
        if stage == "fit" and self.class_weights == "balanced":
            labels = self.trainer.datamodule.train_set.labels  # type: ignore[attr-defined]
            counts = labels.bincount(minlength=self.num_classes).to(self.loss_weights)
            self.loss_weights = len(labels) / (self.num_classes * counts.clamp(min=1))
        if stage == "fit" and self.trainer.ckpt_path is None:
            fresh = self.init_from is None or self._start_from_checkpoint(self.init_from)
            self._start_from_inputs(fresh)
        if self._compile and self.encoder._compiled_call_impl is None:
            self.encoder.compile()

    def _start_from_checkpoint(self, path: str) -> bool:
        """Take over what fits, say what changed, and return whether any projection is left as it was."""
        trained = Classifier.load_from_checkpoint(path)
        try:
            fresh = carry(trained.encoder.trunk, self.encoder.trunk)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; build the encoder with the same arguments") from error
        said = [f"started from {path}"]
        old, new = (model.encoder.trunk.patch_embed.grid_size for model in (trained, self))
        if old != new:
            said.append(f"tokens {old[0]} x {old[1]} before, {new[0]} x {new[1]} now: position embeddings resampled")
            if len(fresh) == 0:
                said[-1] += ", projections interpolated"
        if fresh:
            said.append(f"projections that start anew, for their class or k differs: {len(fresh)}")
        if trained.class_names == self.class_names:
            self.head.load_state_dict(trained.head.state_dict())
        else:
            said.append(f"the head starts anew: {trained.num_classes} classes before, {self.num_classes} now")
        if self.trainer.is_global_zero:
            print("; ".join(said))
        return bool(fresh)

    def _start_from_inputs(self, fresh: bool) -> None:
        """Measure the training set's mean and deviation, and start projections from it that ask for this."""
        datamodule = getattr(self.trainer, "datamodule", None)
        projection = getattr(self.encoder.attention, "projection", None)
        is_singular = fresh and getattr(projection, "start", None) == "singular"
        if datamodule is None:
            if is_singular:
                rank_zero_warn("no data module to start projections from: they stay random; call start_from_inputs")
            return  # the encoder measures the first training batch, unless it was measured
        measure_inputs(self.encoder, datamodule, self.device)
        if is_singular:
            inputs = next(training_inputs(datamodule, self.device))
            start_from_inputs(self.encoder, lambda: self.encoder(inputs))

    def on_fit_start(self) -> None:
        """Plan the learning rate's course anew where a callback, which comes before, has found another learning rate,
        or another batch size and with it another number of steps. A checkpoint's state comes behind."""
        self.train_metrics.reset()  # a training that was interrupted, in Python, has left its samples behind
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        is_resumed_finetuning = self.trainer.ckpt_path and any(isinstance(each, BaseFinetuning) for each in callbacks)
        for config in self.trainer.lr_scheduler_configs:
            if type(config.scheduler) is not Course:  # a subclass's own, or StochasticWeightAveraging's
                continue
            optimizer = config.scheduler.optimizer
            num_steps = self.trainer.estimated_stepping_batches
            if self._planned_for != (self.learning_rate, num_steps):
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] = self.learning_rate
                config.scheduler = warmup_cosine(optimizer, num_steps, self.warmup_fraction)
            if is_resumed_finetuning:  # it has frozen the encoder again
                for group in optimizer.param_groups:
                    for weight in group["params"]:
                        weight.requires_grad = True

    def on_train_start(self) -> None:
        """Let StochasticWeightAveraging go on in the midst of an epoch: it takes up its own course of the learning
        rate when an epoch starts, and the rest of this one would leave a step of it out."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None:
                callback.on_train_epoch_start(self.trainer, self)

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> Tensor:
        inputs, labels = batch
        targets = labels
        if self.mix is not None:
            inputs, targets = self.mix(inputs, F.one_hot(labels, self.num_classes).to(self.dtype))
        logits = self(inputs)
        loss = F.cross_entropy(logits, targets, self.loss_weights, label_smoothing=self.label_smoothing)
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        # LearningRateFinder tries rates beyond those that a training bears, and takes the weights back
        is_bad = not loss.isfinite() and not any(isinstance(each, _LRCallback) for each in callbacks)
        if self.any_rank(is_bad):
            self._bad_steps += 1
            if self._bad_steps > self.skip_bad_steps:
                raise self.diverged("the loss", self.of_all_ranks(self._samples_of(batch_idx) if is_bad else []))
            rank_zero_warn(f"step {self.global_step} left out: its loss is not finite")
            # every rank has a loss then, or those that gather gradients would wait for ever
            return sum((0 * weight).sum() for weight in self.parameters() if weight.requires_grad)  # type: ignore
        self._bad_steps = 0
        self.train_metrics.update(logits.detach(), labels)
        self.log("train/loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Without gradients the optimizer changes nothing."""
        if self._bad_steps:
            self.zero_grad()

    def on_train_epoch_end(self) -> None:
        """Log the epoch's metrics, before a checkpoint of the epoch's end is saved: then no resumed run lacks them."""
        values = self.train_metrics.compute()
        self.train_metrics.reset()
        self.log_dict(values, logger=False, sync_dist=True)
        for logger in self.loggers:
            logger.log_metrics({name: float(value) for name, value in values.items()}, step=self.global_step - 1)

    def _samples_of(self, batch_idx: int) -> list[str]:
        """The names of a training batch's samples, where the data loader can tell."""
        loader: Any = self.trainer.train_dataloader
        if not hasattr(getattr(loader, "sampler", None), "batch"):
            return []
        names = getattr(loader.dataset, "names", None)
        return [str(names[i] if names else i) for i in loader.sampler.batch(batch_idx)]

    def diverged(self, what: str, samples: Sequence[str] = ()) -> DivergenceError:
        """The error to raise when something is not finite any more."""
        (optimizer,) = self.trainer.optimizers
        where = f"step {self.global_step}, learning rate {optimizer.param_groups[0]['lr']:.3g}"
        if samples:
            where += ", training samples " + ", ".join(samples)
        return DivergenceError(
            f"diverged: {what} is not finite any more at {where}; lower model.learning_rate, raise "
            "model.warmup_fraction, clip with --trainer.gradient_clip_val 1, or leave out a few such steps with "
            "--skip_bad_steps 3. A checkpoint, if there is one, is finite: --resume goes on from it"
        )

    def on_validation_epoch_start(self) -> None:
        self.val_loss.reset()  # and so has an evaluation that was interrupted
        self.val_metrics.reset()

    def on_test_epoch_start(self) -> None:
        self.test_loss.reset()
        self.test_metrics.reset()

    def validation_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "val", self.val_loss, self.val_metrics)

    def test_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "test", self.test_loss, self.test_metrics)

    def predict_step(self, batch: Any, batch_idx: int) -> Float[Tensor, "b num_classes"]:
        """Probabilities of a batch of inputs; of the inputs alone where the batch is (inputs, labels)."""
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return self(inputs).float().softmax(dim=-1)

    def _evaluate(
        self, batch: Sequence[Any], stage: str, loss: MeanLoss, metrics: MetricCollection
    ) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = self(inputs)
        loss.update(F.cross_entropy(logits.float(), labels, reduction="none"))
        metrics.update(logits, labels)
        self.log(f"{stage}/loss", loss)
        self.log_dict(metrics, prog_bar=stage == "val")
        return {"logits": logits, "labels": labels}

    def no_weight_decay(self) -> set[str]:
        """Parameters, besides norms and biases, that timm's optimizers leave undecayed."""
        return {"*pos_embed", "*cls_token", "*reg_token"}

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = make_optimizer(self, self.optimizer, self.learning_rate, self.weight_decay)
        num_steps = self.trainer.estimated_stepping_batches
        schedule = warmup_cosine(optimizer, num_steps, self.warmup_fraction)
        self._planned_for = self.learning_rate, num_steps
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the data too, so that a checkpoint alone suffices to test and to predict."""
        data = self._describe_data()
        if data is not None:
            checkpoint["data"] = data
            # which a training must find again to go on
            checkpoint["identity"] = getattr(self.trainer.datamodule, "identity", None)  # type: ignore[attr-defined]

    def _describe_data(self) -> Any:
        return describe(getattr(self.trainer, "datamodule", None))

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | PathLike, map_location: Any = "cpu", **kwargs: Any
    ) -> "Classifier":
        """Rebuild a trained classifier from its checkpoint alone.

        Args:
            checkpoint_path: A file that fit has written.
            map_location: Where its tensors go.
            kwargs: Arguments of the constructor to change.

        Raises:
            CheckpointError: If it is no checkpoint, or does not describe its model.
        """
        checkpoint = read_checkpoint(checkpoint_path, map_location)
        with naming(checkpoint_path):
            model = build_from(cls, checkpoint["hyper_parameters"], **kwargs)
        try:
            model.load_state_dict(checkpoint["state_dict"])
        except RuntimeError as error:
            what = "its weights are not those of the model that it describes"
            raise CheckpointError(f"{checkpoint_path}: {what}; another version of longseq has written it") from error
        return model
