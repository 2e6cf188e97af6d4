"""The LightningModule: an encoder and a linear head, trained on a task."""

import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, NamedTuple

import pytorch_lightning as pl
import torch
from jaxtyping import Bool, Float
from pytorch_lightning.callbacks import BaseFinetuning, GradientAccumulationScheduler
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchmetrics import MetricCollection

from longseq.arguments import ArgumentError, SettingError
from longseq.attention import TokenMixer
from longseq.compat.lightning import (
    callbacks_of,
    hand_on_exact_inputs,
    is_resumed_averaging,
    keep_unbegun_averages,
    running_averages,
)
from longseq.compat.torch import is_compiled
from longseq.encoders import Encoder
from longseq.encoders.encode import shard_of
from longseq.files.checkpoint import Checkpoint, CheckpointError, misfit, read_checkpoint
from longseq.files.description import build_from, describe, naming
from longseq.tasks import SingleLabel, Task
from longseq.tasks.mean_loss import MeanLoss
from longseq.tasks.pooling import Pool
from longseq.training.data import data_of
from longseq.training.devices.processes import is_spare_batch, last_step_factor, shared_loss
from longseq.training.distillation import Teacher
from longseq.training.divergence import BadSteps
from longseq.training.freezing import freeze_encoder, keep_frozen_statistics
from longseq.training.initial_weights import start_from_checkpoint, start_from_data
from longseq.training.mix import Mix
from longseq.training.optimizer import (
    CourseName,
    make_optimizer,
    refuse_wrong_optimizer,
    refuse_wrong_schedule,
    set_rates,
    timed_course,
    torch_scheduler,
    warmup_course,
)


class Answers(NamedTuple):
    """What a model answers to a batch of inputs; or to one part of a file, without the dimension b. What was not asked
    for is None.

    Attributes:
        probabilities: Of all classes, (b, classes).
        features: Before the head, (b, dim).
        scores: The logits of each class at every token, (b, n, classes).
        present: Which of these tokens are there, (b, n); None where all are.
        part, is_last: The part, and whether it is the last one of its file.
    """

    probabilities: Any = None
    features: Any = None
    scores: Any = None
    present: Any = None
    part: Any = None
    is_last: bool = False


class Classifier(pl.LightningModule):
    """Classify images or sounds: logits = W encoder(inputs) + b.

    Batches are ``(inputs, labels)``. The task says what labels are, which loss is trained, and which metrics are logged
    beside it as train/..., val/... and test/....

    Args:
        encoder: Turns inputs into features (b, dim).
        num_classes: Number of classes, 2 or more.
        class_names: Names of the classes, for reports and predictions. If absent, a training takes those of its data
            module, if it has one for each class; else they are numbers.
        task: What is learned; if absent, SingleLabel: one class for each sample.
        optimizer: Name of one of timm's optimizers.
        learning_rate: The peak, reached after warm-up.
        weight_decay: For matrices only; norms, biases, position embeddings and class tokens are not decayed.
        betas: For optimizers such as AdamW, how slowly the running means of gradients and of their squares forget; if
            absent, the optimizer's own (0.9 and 0.999 for AdamW). 0.98 in place of 0.999 suits short trainings.
        warmup_fraction: Share of the steps in which the learning rate rises; then it falls along a cosine to 0.
        label_smoothing: Share of the target spread over all classes, in training.
        class_weights: Weight of the samples of each class in the training loss; in MultiLabel's, of what they say of
            that class. ``balanced`` gives rare classes larger weights, so that the samples of each class count the same
            together; these weights have mean 1 over the labels of a training set with one for each sample.
        mix: Mixes the samples of a training batch: MixUp or CutMix (mix.py).
        init_from: A checkpoint to start a new training from. If its images had another size or its clips another
            length, position embeddings and projections are carried over. If it had other classes, the head starts anew.
        compile: Whether to compile the encoder. It is compiled in place, so names in checkpoints stay the same.
        schedule: How the learning rate goes on after its warm-up: ``cosine`` (to 0), ``constant``, ``linear`` (to 0),
            ``step`` (a tenth after half of the steps, a hundredth after three quarters), ``restarts`` (four cosines),
            or one of torch's schedulers, which has no warm-up: ``{scheduler: StepLR, step_size: 10}``.
        layer_decay: The learning rate of each block is that of the next one times this, such as 0.75; for pretrained
            weights. If absent, all have the same.
        freeze: What keeps its weights: ``encoder``, so that only the head is trained (linear probing), ``stem``, or the
            embedding, a stem, and so many of the first blocks; if absent, nothing. Frozen BatchNorm keeps its
            statistics.
        pool: How scores of tokens become those of the input: ``avg``, ``max``, ``linear_softmax`` or ``attention``
            (tasks/pooling.py). If absent, the encoder pools its features, and these are scored.
        teacher: A checkpoint whose answers are learned besides the labels (knowledge distillation, arXiv:1503.02531):
            the loss is (1 - a) * the task's loss + a * T^2 * KL(softmax(teacher / T) || softmax(outputs / T)). The
            teacher gets the same inputs through its own front end, frozen and in evaluation. Only a training needs it.
        distillation_alpha: a, the teacher's share of the loss.
        temperature: T, by which the outputs of both are divided.

    Raises:
        ValueError: If an argument is out of its range, or does not fit the others.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        class_names: list[str] | None = None,
        task: Task | None = None,
        optimizer: str = "adamw",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_fraction: float = 0.1,
        label_smoothing: float = 0.0,
        class_weights: list[float] | Literal["balanced"] | None = None,
        mix: Mix | None = None,
        init_from: str | None = None,
        compile: bool = False,
        betas: list[float] | None = None,
        pool: Pool | None = None,
        schedule: CourseName | dict[str, Any] = "cosine",
        layer_decay: float | None = None,
        freeze: Literal["encoder", "stem"] | int | None = None,
        teacher: str | None = None,
        distillation_alpha: float = 0.5,
        temperature: float = 2.0,
    ) -> None:
        super().__init__()
        self.task = task or SingleLabel()
        if num_classes < self.task.fewest:
            what = f"must be {self.task.fewest} or more, got {num_classes}; one class needs no classifier"
            raise ArgumentError("num_classes", what)
        if class_names is not None and len(class_names) != num_classes:
            raise ArgumentError(
                "class_names", f"must hold num_classes = {num_classes} names, got {len(class_names)}; name each class"
            )
        refuse_wrong_optimizer(optimizer, learning_rate, weight_decay, betas, layer_decay)
        refuse_wrong_schedule(schedule, warmup_fraction)
        if not 0 <= label_smoothing < 1:
            what = f"must be in 0..1 (1 excluded), got {label_smoothing}; 0 turns it off"
            raise ArgumentError("label_smoothing", what)
        if mix is not None and not mix.suits_sounds and encoder.takes_sounds:
            raise ArgumentError("mix", f"must suit sounds, got {type(mix).__name__}; use MixUp")
        if compile and encoder.reversible:
            what = "must be false with reversible blocks, whose activations a compiled backward pass would keep"
            raise ArgumentError("compile", f"{what}; leave out one of the two")
        if not 0 <= distillation_alpha <= 1:
            raise ArgumentError("distillation_alpha", f"must be in 0..1, got {distillation_alpha}; 0.5 is usual")
        if not 0.01 <= temperature <= 1000:
            raise ArgumentError("temperature", f"must be in 0.01..1000, got {temperature}; 1 to 10 are usual")
        # used only during a training, and not saved in a checkpoint
        self.bad_steps = BadSteps()
        self.teaching: Teacher | None = None
        self.progress: Callable[[], float] | None = None  # the share of a timed training that is done (timed.py)
        self._kind_of_schedule: type | None = None  # that it made itself
        self._planned_for: tuple[Any, ...] | None = None  # the schedule's peak, and the lengths of the training
        self.before_sharding: tuple[Any, str] | None = None  # what a strategy that splits weights keeps: cost, summary
        self._averages_are_swapped_in = False  # by a callback, for a validation
        self.built_on_meta = encoder.mean.is_meta
        self._drawn_from = torch.get_rng_state()  # a model on the meta device has drawn no number
        self.encoder = encoder
        self.num_classes = num_classes
        self.class_names = class_names or _numbers(num_classes)
        self.optimizer, self.learning_rate, self.weight_decay = optimizer, learning_rate, weight_decay
        self.betas = betas
        self.warmup_fraction, self.label_smoothing = warmup_fraction, label_smoothing
        self.class_weights, self.mix = class_weights, mix
        self.register_buffer("loss_weights", _weights(class_weights, num_classes), persistent=False)
        self.init_from, self._compile = init_from, compile
        self.schedule, self.layer_decay, self._freeze = schedule, layer_decay, freeze
        if teacher is not None and not self.task.takes_teacher:
            what = f"must be left out with the task {type(self.task).__name__}, got {teacher}; it cannot learn from one"
            raise ArgumentError("teacher", what)
        self.teacher, self.distillation_alpha, self.temperature = teacher, distillation_alpha, temperature
        self.head = self.task.head(encoder, num_classes)
        self.pool, self.pooling = pool, self.task.pooling(encoder, pool)
        freeze_encoder(encoder, freeze)
        with torch.device("cpu"):  # sums need values, also where the model is built on the meta device
            metrics = MetricCollection(dict(self.task.training_metrics(num_classes)))
            evaluated = MetricCollection({**self.task.own_metrics(num_classes), **self.task.user_metrics(num_classes)})
            self.train_metrics = metrics.clone(prefix="train/")
            self.val_metrics = evaluated.clone(prefix="val/")
            self.test_metrics = evaluated.clone(prefix="test/")
            self.val_loss, self.test_loss = MeanLoss(), MeanLoss()
        self.save_hyperparameters(describe(self)["init_args"], logger=False)

    @property
    def backbone(self) -> Encoder:
        """The encoder, under the name of the module that Lightning's BackboneFinetuning freezes at the start."""
        return self.encoder

    def forward(self, inputs: Any) -> Tensor:
        """The task's outputs for a batch of inputs; for most tasks they are the logits of each class."""
        return self.task.outputs(self.encoder, self.head, inputs, self.pooling)

    def scores(self, inputs: Any) -> tuple[Float[Tensor, "b n classes"], Bool[Tensor, "b n"] | None]:
        """The logits of each class at every token, and which tokens are there; None where all are.

        With ``pool`` the input's logits follow from these. Without, they are those of its mean token.

        Raises:
            SettingError: If tokens lie on several processes.
        """
        self._refuse_a_share_of_tokens()
        tokens, present = self.encoder.token_features(inputs)
        return self.head(tokens), present

    def setup(self, stage: str) -> None:
        """Let inputs keep their precision. Before a training, set class weights and the weights to start from, and
        compile; every rank does the same.

        A model on the meta device first gets the weights that it would have had elsewhere. Where weights are sharded
        only the first rank needs them: the others get their parts from it (devices/fully_sharded.py).

        Raises:
            CheckpointError: If the teacher, or the checkpoint to start from, cannot be used.
            TypeError: If the data module cannot be described; a checkpoint needs its description.
            SettingError: If class_weights is balanced, and there is no data module with labels.
        """
        hand_on_exact_inputs(self.trainer)
        gets_parts = self.built_on_meta and isinstance(self.trainer.strategy, ModelParallelStrategy)
        gets_parts = gets_parts and not self.trainer.is_global_zero
        if self.encoder.mean.is_meta and not gets_parts:
            self._draw_weights()
        if stage == "fit":
            self._describe_data()
            self._take_class_names()
            self._learn_labels()
        if stage == "fit" and self.class_weights == "balanced":
            data = data_of(self.trainer)
            if data is None:
                raise SettingError("model.class_weights: balanced needs a data module that has labels; give numbers")
            labels = data.splits()["train"].labels
            counts = self.task.counts(labels, self.num_classes).to(self.loss_weights)
            self.loss_weights = len(labels) / ((counts > 0).sum() * counts.clamp(min=1))
        if stage == "fit" and self.teacher is not None:
            self.teaching = Teacher(self.teacher, self)
        if stage == "fit" and self.trainer.ckpt_path is None and not gets_parts:
            start_from_data(self, self.init_from is None or start_from_checkpoint(self, self.init_from))
        if self._compile and not is_compiled(self.encoder):
            self.encoder.compile()
            self.encoder.token_features = torch.compile(self.encoder.token_features)
            self.encoder.all_features = torch.compile(self.encoder.all_features)

    def _take_class_names(self) -> None:
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", None) or []
        if self.class_names == _numbers(self.num_classes) and len(names) == self.num_classes:
            self.class_names = self.hparams["class_names"] = [str(name) for name in names]

    def _learn_labels(self) -> None:
        data = data_of(self.trainer)
        if data is not None:
            self.task.learn(data.splits()["train"].labels, self.class_names)
            self.hparams["task"] = describe(self.task)

    def _draw_weights(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._drawn_from)
            drawn = build_from(Classifier, self.hparams)
        self.encoder, self.head, self.pooling = drawn.encoder, drawn.head, drawn.pooling
        self.loss_weights = drawn.loss_weights

    def on_fit_start(self) -> None:
        """Make a new learning rate schedule if a callback has changed the learning rate, or the batch size and with it
        the number of steps. Callbacks run before this hook; Lightning restores a checkpoint's state after it."""
        self._averages_are_swapped_in = False
        self.train_metrics.reset()  # an interrupted training in the same process has left its samples in them
        self.bad_steps.forget()
        is_finetuning = bool(callbacks_of(self.trainer, BaseFinetuning))
        if is_finetuning and self.trainer.world_size > 1:  # DistributedDataParallel knows only what learns at first
            what = "must not hold BackboneFinetuning with several processes: each would train another encoder"
            raise SettingError(f"trainer.callbacks: {what}; train on one device, or leave it out")
        for config in self.trainer.lr_scheduler_configs:
            if type(config.scheduler) is not self._kind_of_schedule:  # keep a subclass's own
                continue
            optimizer = config.scheduler.optimizer
            if self._planned_for != (self.learning_rate, *self._lengths()):
                set_rates(self, optimizer, self.learning_rate)
                made = self._make_schedule(optimizer)
                config.scheduler, config.frequency = made["scheduler"], made["frequency"]
            if is_finetuning and self.trainer.ckpt_path:  # the callback has frozen the encoder again
                for group in optimizer.param_groups:
                    for weight in group["params"]:
                        weight.requires_grad = True

    def on_train_start(self) -> None:
        """Let StochasticWeightAveraging go on in the middle of an epoch. It restores its learning rate schedule only
        when an epoch starts; without this call the rest of the resumed epoch would skip a step of that schedule."""
        for callback in callbacks_of(self.trainer, pl.Callback):
            if is_resumed_averaging(callback):
                callback.on_train_epoch_start(self.trainer, self)

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the layers draw anew what they draw by step. A running average of draws would be no draw, so averaged
        models get the draws themselves."""
        mixers = mixers_of(self).values()
        for mixer in mixers:
            if mixer.training:
                mixer.at_step(self.global_step)
        for average in running_averages(self.trainer):
            for mixer, averaged in zip(mixers, mixers_of(average).values(), strict=True):
                for ours, theirs in zip(mixer.buffers(), averaged.buffers(), strict=True):
                    theirs.copy_(ours)

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> Tensor:
        inputs, labels = batch
        targets = labels
        if self.mix is not None and self.task.predicts is not None:
            inputs, targets = self.mix(inputs, self.task.targets(labels, self.num_classes).to(self.dtype))
        outputs = self(inputs)
        loss = self.task.loss(outputs, targets, self.loss_weights, self.label_smoothing)
        is_spare = is_spare_batch(self.trainer, batch_idx)
        weight = 0 * loss.detach() if is_spare else self.task.weight(outputs, targets, self.loss_weights)
        share, of_all = shared_loss(loss, weight, self.trainer)
        if self.teaching is not None:  # its loss has no class weights: each sample counts once
            taught = self.task.distillation(outputs, self.teaching(inputs, self), self.temperature)
            num_samples = loss.new_full((), 0 if is_spare else len(outputs), dtype=torch.float32)
            losses = zip((loss, share, of_all), (taught, *shared_loss(taught, num_samples, self.trainer)), strict=True)
            alpha = self.distillation_alpha
            loss, share, of_all = ((1 - alpha) * of_task + alpha * of_teacher for of_task, of_teacher in losses)
        if self.bad_steps.count(loss, of_all, self.trainer, batch_idx):
            if isinstance(self, FSDPModule):  # its backward pass must follow; on_before_optimizer_step drops the result
                return share
            # every rank must return a loss, or the ranks that gather gradients would wait for ever
            return sum((0 * weight).sum() for weight in self.parameters() if weight.requires_grad)  # type: ignore
        if not is_spare:
            predicted = self.task.predicted(outputs.detach())
            self.train_metrics.update(*self.task.measured(self.head, predicted, labels))
        self.log("train/loss", of_all)
        return share * last_step_factor(self.trainer, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After a bad step remove the gradients, so that the optimizer changes nothing."""
        if self.bad_steps.is_bad:
            self.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """At logged steps, where the host waits for the device anyway, end a training that diverges."""
        trainer: Any = self.trainer
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            self.bad_steps.check(trainer)

    def on_validation_start(self) -> None:
        self.bad_steps.check(self.trainer)
        keep_unbegun_averages(self.trainer, self)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's metrics before the checkpoint at its end is saved, so that no resumed run lacks them."""
        self.bad_steps.check(self.trainer)
        keep_unbegun_averages(self.trainer, self)  # at the end of the training they replace the model's weights
        values = self.train_metrics.compute()
        self.train_metrics.reset()
        self.log_dict(values, logger=False, sync_dist=True)
        for logger in self.loggers:
            logger.log_metrics({name: float(value) for name, value in values.items()}, step=self.global_step - 1)

    def on_validation_epoch_start(self) -> None:
        self._averages_are_swapped_in = bool(running_averages(self.trainer))  # callbacks run before this hook
        self.val_loss.reset()  # an interrupted evaluation has left its samples in it
        self.val_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self._averages_are_swapped_in = False

    def on_test_epoch_start(self) -> None:
        self.test_loss.reset()
        self.test_metrics.reset()

    def validation_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "val", self.val_loss, self.val_metrics)

    def test_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "test", self.test_loss, self.test_metrics)

    def predict_step(self, batch: Any, batch_idx: int, **wanted: bool) -> Any:
        """Probabilities for a batch of inputs, (b, classes); the labels of a batch (inputs, labels) are ignored. With
        keywords, which are those of ``answers``, its Answers."""
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return self.answers(inputs, **wanted) if wanted else self.task.probabilities(self(inputs))

    def answers(self, inputs: Any, probabilities: bool = True, features: bool = False, scores: bool = False) -> Answers:
        """What is asked for, from one pass. A task without labels has features alone.

        Raises:
            SettingError: If the scores of tokens are asked for, and tokens lie on several processes.
        """
        if not scores and not (probabilities and features):  # the encoder may take a shorter way
            if features:
                return Answers(features=self.encoder(inputs))
            return Answers(self.task.probabilities(self(inputs)))
        if scores:
            self._refuse_a_share_of_tokens()
        of_inputs, tokens, present = self.encoder.all_features(inputs)
        if features and self.task.predicts is None:
            return Answers(features=of_inputs)
        of_tokens = self.head(tokens) if scores or self.pooling is not None else None
        outputs = self.head(of_inputs) if self.pooling is None else self.pooling(tokens, of_tokens, present)
        of_frames = (of_tokens, present) if scores else (None, None)
        return Answers(self.task.probabilities(outputs), of_inputs if features else None, *of_frames)

    def _refuse_a_share_of_tokens(self) -> None:
        if shard_of(self.encoder.trunk) is not None:
            what = "SequenceParallel gives each process the scores of its own tokens alone"
            raise SettingError(f"trainer.strategy: {what}; find events, and scores of tokens, on one device")

    def _evaluate(
        self, batch: Sequence[Any], stage: str, loss: MeanLoss, metrics: MetricCollection
    ) -> dict[str, Tensor]:
        inputs, labels = batch
        outputs = self(inputs)
        loss.update(self.task.losses(outputs, labels))
        predicted = self.task.predicted(outputs)
        metrics.update(*self.task.measured(self.head, predicted, labels), logits=outputs)
        self.log(f"{stage}/loss", loss)
        self.log_dict(metrics, prog_bar=stage == "val")
        return {"outputs": outputs, "labels": labels, "predicted": predicted}

    def no_weight_decay(self) -> set[str]:
        """Parameters, besides norms and biases, that timm's optimizers leave undecayed."""
        of_layers = {
            f"{name}.{weight}" for name, layer in mixers_of(self).items() for weight in layer.no_weight_decay()
        }
        return {"*pos_embed", "*cls_token", "*reg_token"} | of_layers

    def learning_rates(self, learning_rate: float) -> dict[str, float]:
        """Parameters that have another learning rate than the others, whose rate is given."""
        of_layers = ((name, layer.learning_rates(learning_rate)) for name, layer in mixers_of(self).items())
        return {f"{name}.{weight}": rate for name, rates in of_layers for weight, rate in rates.items()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters belong to which layer, for timm's layer-wise decay of the learning rate."""
        stem = r"^encoder\.trunk\.(?:patch_embed|pos_embed|cls_token|reg_token)"
        return {
            "stem": stem,
            "blocks": [(r"^encoder\.trunk\.blocks\.(\d+)", None), (r"^encoder\.trunk\.(?:norm|fc_norm)\.", (99999,))],
        }

    def train(self, mode: bool = True) -> "Classifier":
        """As torch; an encoder that is frozen as a whole stays in evaluation, without dropout and masks."""
        super().train(mode)
        if self._freeze == "encoder":
            self.encoder.eval()
        elif self._freeze is not None:
            keep_frozen_statistics(self.encoder)
        return self

    def configure_optimizers(self) -> dict[str, Any]:
        rates = self.learning_rate, self.weight_decay, self.betas, self.layer_decay
        optimizer = make_optimizer(self, self.optimizer, *rates)
        return {"optimizer": optimizer, "lr_scheduler": self._make_schedule(optimizer)}

    def _make_schedule(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.progress is not None and isinstance(self.schedule, str):
            course = timed_course(optimizer, self.progress, self.warmup_fraction, self.schedule)
            return {"scheduler": course, "interval": "step", "frequency": 1}
        lengths = self._lengths()
        if isinstance(self.schedule, str):
            course = warmup_course(optimizer, lengths[1], self.warmup_fraction, self.schedule)
            made: dict[str, Any] = {"scheduler": course, "interval": "step", "frequency": 1}
        else:
            made = torch_scheduler(optimizer, self.schedule, *lengths)
        self._kind_of_schedule, self._planned_for = type(made["scheduler"]), (self.learning_rate, *lengths)
        return made

    def _lengths(self) -> tuple[int | float, int | float, int | float]:
        """The batches of an epoch, infinite of a loader without a length, and the optimizer steps and the whole epochs
        of the training, as they are now."""
        if callbacks_of(self.trainer, GradientAccumulationScheduler):  # Lightning counts wrong
            what = "GradientAccumulationScheduler changes the number of steps, on which the learning rate depends"
            raise SettingError(f"trainer.callbacks: {what}; give --trainer.accumulate_grad_batches instead")
        num_steps = self.trainer.estimated_stepping_batches
        self.trainer.fit_loop.setup_data()  # counts the batches of an epoch, also where the epochs have no end
        batches = self.trainer.num_training_batches
        return batches, num_steps, num_steps // max(-(-batches // self.trainer.accumulate_grad_batches), 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Describe the data too, so that a checkpoint alone is enough to test and to predict. Averages of the weights
        stand under ``state_dict`` also where a validation is interrupted, in which the model holds the averages."""
        keep_unbegun_averages(self.trainer, self)  # what callbacks have put into the checkpoint are these same tensors
        if self._averages_are_swapped_in and "current_model_state" in checkpoint:
            averages, weights = checkpoint["current_model_state"], checkpoint["state_dict"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = averages, weights
        data = self._describe_data()
        if data is not None:
            checkpoint["data"] = data
            datamodule = data_of(self.trainer)
            checkpoint["identity"] = None if datamodule is None else dict(datamodule.identity)

    def _describe_data(self) -> Any:
        return describe(getattr(self.trainer, "datamodule", None))

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | PathLike, map_location: Any = "cpu", **kwargs: Any
    ) -> "Classifier":
        """Rebuild a trained classifier from its checkpoint alone.

        Args:
            checkpoint_path: A file that fit has written.
            map_location: Where to put its tensors.
            kwargs: Arguments of the constructor to change.

        Raises:
            CheckpointError: If it is no checkpoint, or does not describe its model.
        """
        return cls.from_checkpoint(read_checkpoint(checkpoint_path, map_location), **kwargs)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> "Classifier":
        """As ``load_from_checkpoint``, from a checkpoint that is open."""
        with naming(checkpoint.path):
            model = build_from(cls, checkpoint["hyper_parameters"], **kwargs)
        if what := misfit(checkpoint["state_dict"], model.state_dict()):
            raise CheckpointError(f"{checkpoint.path}: {what}")
        model.load_state_dict(checkpoint["state_dict"])
        return model


def _numbers(num_classes: int) -> list[str]:
    """The names of classes that have no other."""
    return [str(label) for label in range(num_classes)]


def _weights(class_weights: Sequence[float] | str | None, num_classes: int) -> Tensor:
    """A weight for each class: the given ones, or 1, as long as there are no labels to balance.

    Raises:
        ValueError: If there are not as many positive numbers as classes.
    """
    if class_weights is None or class_weights == "balanced":
        return torch.ones(num_classes)
    are_numbers = not isinstance(class_weights, str) and all(0 < weight < math.inf for weight in class_weights)
    if not are_numbers or len(class_weights) != num_classes:
        what = f"must be {num_classes} positive numbers or balanced, got {class_weights}; give one for each class"
        raise ArgumentError("class_weights", what)
    return torch.tensor(class_weights, dtype=torch.float32)


def mixers_of(model: pl.LightningModule) -> dict[str, TokenMixer]:
    """The layers that mix tokens, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TokenMixer)}
