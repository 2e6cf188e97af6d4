"""The LightningModule: an encoder and a head, trained on a task."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from typing import Annotated, Any, Literal, NamedTuple

import pytorch_lightning as pl
import torch
from jaxtyping import Bool, Float
from pytorch_lightning.callbacks import BaseFinetuning
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import MetricCollection

from longseq.arguments import ArgumentError, SettingError
from longseq.attention import TokenMixer
from longseq.compat.lightning import (
    callbacks_of,
    hand_on_exact_inputs,
    has_synced_batch_norms,
    is_resumed_averaging,
    keep_unbegun_averages,
    running_averages,
    trainer_of,
)
from longseq.compat.torch import HAS_TRITON, at_least_float32, is_compiled
from longseq.encoders import Encoder
from longseq.encoders.forward_pass import shard_of
from longseq.encoders.stem import NOT_OF_ALL_PROCESSES
from longseq.files.checkpoint import TO_TEACHER, Checkpoint, CheckpointError, misfit, read_checkpoint
from longseq.files.checkpoint import data_of as data_described_by
from longseq.files.description import allow_classes, build, build_from, describe, naming
from longseq.tasks import SingleLabel, Task
from longseq.tasks.mean_loss import ExactMetrics, MeanLoss
from longseq.tasks.pooling import Pool
from longseq.training._freezing import freeze_encoder, keep_frozen_statistics
from longseq.training._initial_weights import start_from_checkpoint, start_from_data
from longseq.training.compiled import Compile, compile_encoder, keep_gradients, samples_of_a_batch
from longseq.training.data import data_of
from longseq.training.devices.processes import Loss, is_spare_batch, loss_of_step
from longseq.training.distillation import NetworkTeacher, Teacher, Teaching, is_network
from longseq.training.divergence import BadSteps
from longseq.training.memory import keep_freed_memory, stop_keeping_freed_memory
from longseq.training.mix import Mix, MixUp
from longseq.training.optimizer import lengths_of, set_rates
from longseq.training.recipe import Recipe


class Answers(NamedTuple):
    """The answers of a model to a batch of inputs, or to one part of a file (then without the dimension b). An answer
    that was not asked for is None.

    Attributes:
        probabilities: Of all classes, (b, classes).
        features: Before the head, (b, dim).
        scores: The logits of each class at every token, (b, n, classes).
        present: Which of these tokens are present, (b, n); None if all are.
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

    Batches are ``(inputs, labels)``. The task defines labels, loss and metrics. The last two are logged as train/...,
    val/... and test/....

    Args:
        encoder: Turns inputs into features (b, dim).
        num_classes: Number of classes, 2 or more.
        class_names: Names of the classes, for reports and predictions. If absent, a training takes them from its data
            module, if it has one for each class; otherwise they are numbers.
        task: What is learned; if absent, SingleLabel: one class for each sample.
        init_from: A checkpoint to start a new training from. If its images had another size or its clips another
            length, position embeddings and projections are resampled. If it had other classes, the head gets new
            weights.
        compile: Whether to compile the encoder. It is compiled in place, so names in checkpoints stay the same. Smaller
            batches and shorter sounds are padded, so that few compilations are needed (training/compiled.py).
            ``blocks`` compiles one block, which all equal blocks share, so a training starts sooner.
            ``reduce-overhead`` also records CUDA graphs of the whole encoder, so that the host starts all kernels of a
            pass at once.
        freeze: What is not trained: ``encoder`` (linear probing: only the head is trained), ``stem``, or a number: the
            embedding, a stem, and that many of the first blocks. If absent, nothing is frozen. Frozen BatchNorm keeps
            its statistics.
        pool: How the scores of tokens are pooled: ``avg``, ``max``, ``linear_softmax`` or ``attention``
            (tasks/pooling.py). If absent, the encoder pools its features, and the head scores the result.
        recipe: Arguments of ``Recipe``.

    Raises:
        ValueError: If an argument is out of its range, or does not fit the others.
    """

    # arguments of the recipe
    learning_rate: float
    label_smoothing: float
    mix: Mix | None
    teacher: str | dict[str, Any] | None
    distillation: Literal["logits", "features"]

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        class_names: list[str] | None = None,
        task: Task | None = None,
        *,
        init_from: str | None = None,
        compile: Compile = False,
        freeze: Literal["encoder", "stem"] | int | None = None,
        pool: Pool | None = None,
        **recipe: Annotated[Any, Recipe],
    ) -> None:
        super().__init__()
        self.task = task or SingleLabel()
        if num_classes < self.task.fewest:
            name, known = type(self.task).__name__, f" ({', '.join(class_names)})" if class_names else ""
            what = f"must be {self.task.fewest} or more for the task {name}, got {num_classes}{known}"
            raise ArgumentError("num_classes", f"{what}; add a class, or pretrain without labels: the task Masked")
        if class_names is not None and len(class_names) != num_classes:
            what = f"must hold num_classes = {num_classes} names, got {len(class_names)}; name each class"
            raise ArgumentError("class_names", what)
        described = Recipe(**recipe)
        for name, value in vars(described).items():
            setattr(self, name, value)
        if self.mix is not None and encoder.kind not in self.mix.suits:
            remedy = "use MixUp" if encoder.kind in MixUp.suits else "leave it out"
            raise ArgumentError("mix", f"must suit {encoder.kind}, got {type(self.mix).__name__}; {remedy}")
        if self.teacher is not None and not (self.task.takes_teacher or (self.task.predicts and self._learns_features)):
            what = f"must be left out with the task {type(self.task).__name__}, got {self.teacher}"
            raise ArgumentError("teacher", f"{what}; it cannot learn from one")
        if self._learns_features and freeze == "encoder":
            what = "must be logits with freeze encoder, whose features do not change, got features"
            raise ArgumentError("distillation", f"{what}; leave out one of the two")
        if compile and encoder.reversible:
            what = "must be false with reversible blocks, whose activations a compiled backward pass would keep"
            raise ArgumentError("compile", f"{what}; leave out one of the two")
        # used only during a training, and not saved in a checkpoint
        self.bad_steps = BadSteps()
        self.teaching: Teaching | None = None
        self.to_teacher: nn.Linear | None = None  # from features to those of the teacher
        self.progress: Callable[[], float] | None = None  # the share of a timed training that is done (timed.py)
        self._kind_of_schedule: type | None = None  # the class of the schedule that this class has made
        self._planned_for: tuple[Any, ...] | None = None  # the schedule's peak, and the lengths of the training
        self.before_sharding: tuple[Any, str] | None = None  # cost and summary, before a strategy splits the weights
        self._averages_are_swapped_in = False  # by a callback, for a validation
        self.built_on_meta = encoder.mean.is_meta
        self._drawn_from = torch.get_rng_state()  # a model on the meta device draws its weights from it later
        self.encoder, self.num_classes = encoder, num_classes
        self.class_names = class_names or _numbers(num_classes)
        self.register_buffer("loss_weights", described.weights(num_classes), persistent=False)
        self._compile: Compile = compile
        self.init_from, self._freeze = init_from, freeze
        self.is_started = False  # True once its weights come from a training, which another fit goes on with
        self.head = self.task.head(encoder, num_classes)
        self.pool, self.pooling = pool, self.task.pooling(encoder, pool)
        freeze_encoder(encoder, freeze)
        with torch.device("cpu"):  # metrics sum values, so they must not be on the meta device
            metrics = ExactMetrics(dict(self.task.training_metrics(num_classes)))
            evaluated = ExactMetrics({**self.task.own_metrics(num_classes), **self.task.user_metrics(num_classes)})
            self.train_metrics = metrics.clone(prefix="train/")
            self.val_metrics = evaluated.clone(prefix="val/")
            self.test_metrics = evaluated.clone(prefix="test/")
            self.val_loss, self.test_loss = MeanLoss(), MeanLoss()
        self.save_hyperparameters(describe(self)["init_args"], logger=False)

    @property
    def backbone(self) -> Encoder:
        """The encoder: Lightning's BackboneFinetuning freezes the module of this name at the start."""
        return self.encoder

    def forward(self, inputs: Any) -> Tensor:
        """The task's outputs for a batch of inputs; for most tasks they are the logits of each class."""
        return self.task.outputs(self.encoder, self.head, inputs, self.pooling)

    def scores(self, inputs: Any) -> tuple[Float[Tensor, "b n classes"], Bool[Tensor, "b n"] | None]:
        """The logits of each class at every token, and which tokens are present; None if all are.

        With ``pool``, the input's logits are computed from these. Without it, they are the logits of the mean token.

        Raises:
            SettingError: If several processes share the tokens.
        """
        self._refuse_a_share_of_tokens()
        tokens, present = self.encoder.token_features(inputs)
        return self.head(tokens), present

    def setup(self, stage: str) -> None:
        """Let inputs keep their precision, and on a CPU let glibc keep freed memory until ``teardown``
        (longseq/training/memory.py). Before a training, also learn the labels, set the initial weights, and compile.
        Every rank does the same.

        A model on the meta device first draws the weights that it would have had on another device. If weights are
        sharded, only the first rank draws them, and the others get their parts from it (devices/fully_sharded.py).

        Raises:
            CheckpointError, SettingError: If the teacher, or the checkpoint to start from, cannot be used.
            TypeError: If the data module cannot be described; a checkpoint needs its description.
            SettingError: If class_weights is balanced, and there is no data module with labels, or if the statistics of
                a stem would be those of all processes.
        """
        if self._is_on("cpu"):
            keep_freed_memory()
        hand_on_exact_inputs(self.trainer)
        gets_parts = self.built_on_meta and isinstance(self.trainer.strategy, ModelParallelStrategy)
        gets_parts = gets_parts and not self.trainer.is_global_zero
        if self.encoder.mean.is_meta and not gets_parts:
            self._draw_weights()
        if stage == "fit":
            if getattr(self.encoder, "stem", None) is not None and has_synced_batch_norms(self.trainer):
                raise SettingError(NOT_OF_ALL_PROCESSES)
            self._describe_data()
            self._learn_labels()
            if self.teacher is not None:
                self._meet_teacher(self.teacher)
            if self.trainer.ckpt_path is None and not gets_parts:
                new = not self.is_started and (self.init_from is None or start_from_checkpoint(self, self.init_from))
                start_from_data(self, new)
            self.is_started = True
        if self._compile and not is_compiled(self.encoder):
            if self._is_on("cuda") and not HAS_TRITON:
                what = "on a GPU it needs Triton, a C compiler and Python.h, and one is missing"
                raise SettingError(f"model.compile: {what}; install gcc and python3-dev, or give false")
            compile_encoder(self.encoder, self._compile, lambda: samples_of_a_batch(trainer_of(self)))

    def _meet_teacher(self, teacher: str | dict[str, Any]) -> None:
        if is_network(teacher):
            self.teaching = NetworkTeacher(teacher, self, getattr(self.trainer, "datamodule", None))
        else:
            assert isinstance(teacher, str)
            self.teaching = Teacher(teacher, self)
        if not self._learns_features:
            return
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            what = "features cannot be learned with sharded weights"
            raise SettingError(f"model.distillation: {what}; give logits, or another --trainer.strategy")
        with torch.random.fork_rng(devices=[]):  # the same on any number of processes
            torch.set_rng_state(self._drawn_from)
            new = nn.Linear(self.encoder.dim, self.teaching.width, bias=False)
        # callbacks have copied the model before; the copies get the same weights in the same order
        for model in (self, *running_averages(self.trainer)):
            model.to_teacher = copy.deepcopy(new).to(model.encoder.mean.device)

    @property
    def _learns_features(self) -> bool:
        return self.teacher is not None and self.distillation == "features"

    def teardown(self, stage: str) -> None:
        """Give the freed memory back. A training that ends with an error keeps it until the next one has ended."""
        if self._is_on("cpu"):
            stop_keeping_freed_memory()

    def _is_on(self, kind: str) -> bool:
        """Whether the trainer uses a device of this kind."""
        return self.trainer.strategy.root_device.type == kind

    def _learn_labels(self) -> None:
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", None) or []
        if self.class_names == _numbers(self.num_classes) and len(names) == self.num_classes:
            self.class_names = self.hparams["class_names"] = [str(name) for name in names]
        data, is_balanced = data_of(self.trainer), self.class_weights == "balanced"
        if data is not None:
            labels = data.splits()["train"].labels
            self.task.learn(labels, self.class_names)
            self.hparams["task"] = describe(self.task)
            if is_balanced:
                counts = self.task.counts(labels, self.num_classes).to(self.loss_weights)
                self.loss_weights = len(labels) / ((counts > 0).sum() * counts.clamp(min=1))
        elif is_balanced:
            raise SettingError("model.class_weights: balanced needs a data module that has labels; give numbers")

    def _draw_weights(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._drawn_from)
            drawn = build_from(Classifier, self.hparams)
        self.encoder, self.head, self.pooling = drawn.encoder, drawn.head, drawn.pooling
        self.loss_weights = drawn.loss_weights

    def on_fit_start(self) -> None:
        """Make a new learning rate schedule if a callback has changed the learning rate, or the batch size and with it
        the number of steps. Callbacks run before this hook, and Lightning restores a checkpoint's state after it."""
        self._averages_are_swapped_in = False
        self.train_metrics.reset()  # they may hold samples of an interrupted training in the same process
        self.bad_steps.forget()
        is_finetuning = bool(callbacks_of(self.trainer, BaseFinetuning))
        if is_finetuning and self.trainer.world_size > 1:  # DDP averages gradients of initially trained weights only
            what = "must not hold BackboneFinetuning with several processes: each would train another encoder"
            raise SettingError(f"trainer.callbacks: {what}; train on one device, or leave it out")
        for config in self.trainer.lr_scheduler_configs:
            if type(config.scheduler) is not self._kind_of_schedule:  # keep the schedule of a subclass
                continue
            optimizer = config.scheduler.optimizer
            if self._planned_for != (self.learning_rate, lengths_of(self.trainer)):
                set_rates(self, optimizer, self.learning_rate)
                schedule = self._make_schedule(optimizer)
                config.scheduler, config.frequency = schedule["scheduler"], schedule["frequency"]
            if is_finetuning and self.trainer.ckpt_path:  # the callback has frozen the encoder again
                for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
                    weight.requires_grad = True

    def on_train_start(self) -> None:
        """Let StochasticWeightAveraging resume in the middle of an epoch. It restores its learning rate schedule only
        when an epoch starts; without this call the rest of the resumed epoch would skip a step of that schedule."""
        for callback in callbacks_of(self.trainer, pl.Callback):
            if is_resumed_averaging(callback):
                callback.on_train_epoch_start(self.trainer, self)

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the layers draw their random numbers of this step. Averaged models get the same numbers, because an
        average of random draws would not be a draw."""
        mixers = _mixers_of(self).values()
        for mixer in mixers:
            if mixer.training:
                mixer.at_step(self.global_step)
        for average in running_averages(self.trainer):
            for mixer, averaged in zip(mixers, _mixers_of(average).values(), strict=True):
                for ours, theirs in zip(mixer.buffers(), averaged.buffers(), strict=True):
                    theirs.copy_(ours)
        if self._compile:  # CUDA graphs overwrite what the step before has left in their memory
            torch.compiler.cudagraph_mark_step_begin()
        if self._accumulates_in_graphs:
            keep_gradients(self)

    @property
    def _accumulates_in_graphs(self) -> bool:
        return self._compile == "reduce-overhead" and self.trainer.accumulate_grad_batches > 1

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self._accumulates_in_graphs)

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> Tensor:
        inputs, labels, *taught = batch
        inputs, targets, *taught = self.mixed(inputs, labels, *taught)
        features, outputs = (None, self(inputs)) if self.to_teacher is None else self._features_and_outputs(inputs)
        losses = self._losses(inputs, outputs, targets, features, *taught)
        loss, returned, of_all = loss_of_step(losses, self.trainer, batch_idx)
        if self.bad_steps.count(loss, of_all, self.trainer, batch_idx):
            if isinstance(self, FSDPModule):  # it needs a backward pass; on_before_optimizer_step drops the gradients
                return returned
            # without a loss of every rank, the ranks that gather gradients would wait for ever
            return sum((0 * weight).sum() for weight in self.parameters() if weight.requires_grad)  # type: ignore
        if not is_spare_batch(self.trainer, batch_idx):
            predicted = self.task.predicted(outputs.detach())
            self.train_metrics.update(*self.task.measured(self.head, predicted, labels))
        self.log("train/loss", of_all)
        return returned

    def mixed(self, inputs: Any, labels: Tensor, *taught: Tensor) -> tuple[Any, ...]:
        """The inputs and targets of a training batch, and what a teacher gives of it, mixed if ``mix`` is given."""
        if self.mix is None or self.task.predicts is None:
            return inputs, labels, *taught
        exact = at_least_float32(self.loss_weights)  # bfloat16 has too few digits for amounts
        targets = self.task.targets(labels, self.num_classes).to(exact)
        inputs, both = self.mix(inputs, torch.cat([targets, *taught], dim=1))
        return inputs, *both.split([targets.shape[1], *(rows.shape[1] for rows in taught)], dim=1)

    def _features_and_outputs(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The features of a batch, and the outputs, from one pass."""
        if self.pooling is None:
            features = self.encoder(inputs)
            return features, self.head(features)
        features, tokens, present = self.encoder.all_features(inputs)
        return features, self.pooling(tokens, self.head(tokens), present)

    def _losses(
        self, inputs: Any, outputs: Tensor, targets: Tensor, features: Tensor | None, taught: Tensor | None = None
    ) -> list[Loss]:
        """The parts of the loss of a training batch."""
        mean = self.task.loss(outputs, targets, self.loss_weights, self.label_smoothing)
        loss = Loss(1.0, mean, self.task.weight(outputs, targets, self.loss_weights))
        if self.teaching is None:
            return [loss]
        return self.teaching.losses(loss, inputs, outputs, self, features, taught)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the gradients of a bad step, so that the optimizer changes nothing."""
        if self.bad_steps.is_bad:
            self.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a diverged training. Only logged steps check this, because there the host waits for the device anyway."""
        trainer: Any = self.trainer
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            self.bad_steps.check(trainer)

    def on_validation_start(self) -> None:
        self.bad_steps.check(self.trainer)
        keep_unbegun_averages(self.trainer, self)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's metrics before the checkpoint at its end is saved, so that a resumed run has them too."""
        self.bad_steps.check(self.trainer)
        keep_unbegun_averages(self.trainer, self)  # at the end of the training they replace the model's weights
        values = self.train_metrics.compute()
        self.train_metrics.reset()
        self.log_dict(values, logger=False, sync_dist=True)
        for logger in self.loggers:
            logger.log_metrics({name: float(value) for name, value in values.items()}, step=self.global_step - 1)

    def on_validation_epoch_start(self) -> None:
        self._averages_are_swapped_in = bool(running_averages(self.trainer))  # callbacks run before this hook
        self.val_loss.reset()  # it may hold samples of an interrupted evaluation
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
        """Probabilities for a batch of inputs, (b, classes). The labels of a batch (inputs, labels) are ignored.
        With keyword arguments of ``answers``, return its Answers."""
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return self.answers(inputs, **wanted) if wanted else self.task.probabilities(self(inputs))

    def answers(self, inputs: Any, probabilities: bool = True, features: bool = False, scores: bool = False) -> Answers:
        """The answers that are asked for, from one forward pass. A task without labels has features only.

        Raises:
            SettingError: If scores of tokens are asked for, and several processes share the tokens.
        """
        if not scores and not (probabilities and features):  # the encoder may have a faster path
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
        """Parameters without weight decay in timm's optimizers, in addition to norms and biases."""
        layers = _mixers_of(self).items()
        of_layers = {f"{name}.{weight}" for name, layer in layers for weight in layer.no_weight_decay()}
        return {"*pos_embed", "*cls_token", "*reg_token"} | of_layers

    def learning_rates(self, learning_rate: float) -> dict[str, float]:
        """The learning rates of the parameters with rates other than the given one."""
        of_layers = ((name, layer.learning_rates(learning_rate)) for name, layer in _mixers_of(self).items())
        return {f"{name}.{weight}": rate for name, rates in of_layers for weight, rate in rates.items()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The layer of each parameter, for timm's layer-wise decay of the learning rate."""
        stem = r"^encoder\.trunk\.(?:patch_embed|pos_embed|cls_token|reg_token)"
        return {
            "stem": stem,
            "blocks": [(r"^encoder\.trunk\.blocks\.(\d+)", None), (r"^encoder\.trunk\.(?:norm|fc_norm)\.", (99999,))],
        }

    def train(self, mode: bool = True) -> "Classifier":
        """Like torch's, except that a fully frozen encoder stays in evaluation mode, without dropout and masks."""
        super().train(mode)
        if self._freeze == "encoder":
            self.encoder.eval()
        elif self._freeze is not None:
            keep_frozen_statistics(self.encoder)
        return self

    @property
    def recipe(self) -> Recipe:
        """The recipe of the current attributes, which callbacks may have changed."""
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.recipe.make_optimizer(self)
        return {"optimizer": optimizer, "lr_scheduler": self._make_schedule(optimizer)}

    def _make_schedule(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        end = self.progress or lengths_of(self.trainer)
        schedule = self.recipe.make_schedule(optimizer, end)
        if self.progress is None:
            self._kind_of_schedule, self._planned_for = type(schedule["scheduler"]), (self.learning_rate, end)
        return schedule

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Describe the data too, so that a checkpoint alone is enough to test and to predict. If weights are averaged,
        ``state_dict`` holds the averages, even if a validation is interrupted, during which the model holds them."""
        keep_unbegun_averages(self.trainer, self)  # callbacks have put these same tensors into the checkpoint
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

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Like torch's, except that a model which does not learn features of a teacher leaves their map out.

        Raises:
            CheckpointError: If the teacher gives another number of features than the one in the checkpoint.
        """
        saved, own = state_dict.get(TO_TEACHER), self.to_teacher
        if saved is not None and own is None:
            state_dict = {name: weight for name, weight in state_dict.items() if name != TO_TEACHER}
        elif saved is not None and saved.shape != own.weight.shape:  # type: ignore[union-attr]
            what = f"gives {len(own.weight)} features, and that of the checkpoint gave {len(saved)}"  # type: ignore[union-attr]
            raise CheckpointError(f"model.teacher: {what}; give the same one")
        return super().load_state_dict(state_dict, strict, assign)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | PathLike, map_location: Any = "cpu", **kwargs: Any
    ) -> "Classifier":
        """Rebuild a trained classifier from its checkpoint alone.

        Args:
            checkpoint_path: A file that fit has written.
            map_location: The device for its tensors.
            kwargs: Arguments of the constructor to change.

        Raises:
            CheckpointError: If it is not a checkpoint, or does not describe its model.
        """
        return cls.from_checkpoint(read_checkpoint(checkpoint_path, map_location), **kwargs)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> "Classifier":
        """Like ``load_from_checkpoint``, from an open checkpoint."""
        with naming(checkpoint.path):
            model = build_from(cls, checkpoint["hyper_parameters"], **kwargs)
        if what := misfit(checkpoint["state_dict"], model.state_dict()):
            raise CheckpointError(f"{checkpoint.path}: {what}")
        model.load_state_dict(checkpoint["state_dict"])
        model.is_started = True
        return model


def _numbers(num_classes: int) -> list[str]:
    return [str(label) for label in range(num_classes)]


def _mixers_of(model: pl.LightningModule) -> dict[str, TokenMixer]:
    """The layers that mix tokens, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TokenMixer)}


def model_and_data(
    ckpt_path: str | PathLike, allow_class: Sequence[str] = (), root: str | None = None
) -> tuple[Classifier, Any]:
    """The model of a checkpoint, in evaluation, and the data module that it was trained with.

    Args:
        ckpt_path: A checkpoint of fit.
        allow_class: Packages whose classes the checkpoint may name, in addition to longseq's.
        root: Folder of the data, if it has moved.

    Raises:
        CheckpointError: If it is no checkpoint, or does not describe its model and its data.
    """
    allow_classes(list(allow_class))
    checkpoint = read_checkpoint(ckpt_path)
    description = data_described_by(checkpoint, ckpt_path)
    model = Classifier.from_checkpoint(checkpoint).eval()
    if root is not None:
        description = {**description, "init_args": {**description["init_args"], "root": root}}
    with naming(ckpt_path):
        return model, build(description, pl.LightningDataModule)
