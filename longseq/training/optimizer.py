"""The optimizer and the learning rate schedule."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR

from longseq.arguments import ArgumentError, SettingError
from longseq.compat.lightning import callbacks_of, leave_unscaling_to_lightning

# The learning rate after its warm-up: its share of the peak, by the share of the steps that are done.
_COURSES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "step": lambda progress: 0.1 ** ((progress >= 0.5) + (progress >= 0.75)),
    "restarts": lambda progress: 0.5 * (1 + math.cos(math.pi * (4 * progress % 1))),
}
CourseName = Literal["cosine", "constant", "linear", "step", "restarts"]


# Of a training: batches per epoch (infinite if the loader has no length), optimizer steps, whole epochs.
Lengths = tuple[int | float, int | float, int | float]


def lengths_of(trainer: pl.Trainer) -> Lengths:
    """The current lengths of a trainer's training.

    Raises:
        SettingError: If a callback changes the number of batches per step.
    """
    if callbacks_of(trainer, GradientAccumulationScheduler):  # Lightning counts the steps wrong
        what = "GradientAccumulationScheduler changes the number of steps, on which the learning rate depends"
        raise SettingError(f"trainer.callbacks: {what}; give --trainer.accumulate_grad_batches instead")
    num_steps = trainer.estimated_stepping_batches
    trainer.fit_loop.setup_data()  # counts the batches of an epoch, also where the epochs have no end
    batches = trainer.num_training_batches
    return batches, num_steps, num_steps // max(-(-batches // trainer.accumulate_grad_batches), 1)


@dataclass(frozen=True)
class Optimization:
    """How weights are trained: an optimizer, and its learning rate schedule.

    Args:
        optimizer: Name of one of timm's optimizers.
        learning_rate: The peak, reached after warm-up.
        weight_decay: For matrices only; norms, biases, position embeddings and class tokens are not decayed.
        betas: Decay rates of the running means of gradients and of their squares, for optimizers such as AdamW. If
            absent, the optimizer's own (0.9 and 0.999 for AdamW). 0.98 instead of 0.999 suits short trainings.
        schedule: The learning rate after its warm-up: ``cosine`` (to 0), ``constant``, ``linear`` (to 0),
            ``step`` (a tenth after half of the steps, a hundredth after three quarters), ``restarts`` (four cosines),
            or one of torch's schedulers, which has no warm-up: ``{scheduler: StepLR, step_size: 10}``.
        warmup_fraction: Share of the steps in which the learning rate rises to its peak.
        layer_decay: The learning rate of each block is that of the next block times this factor. 0.75 suits pretrained
            weights. If absent, all blocks have the same rate.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    betas: list[float] | None = None
    schedule: CourseName | dict[str, Any] = "cosine"
    warmup_fraction: float = 0.1
    layer_decay: float | None = None

    def __post_init__(self) -> None:
        name, betas = self.optimizer, self.betas
        if name not in list_optimizers() or name == "adahessian":  # it needs second derivatives
            raise ArgumentError("optimizer", f"must be one of timm's, got {name!r}; adamw, lamb, lion and sgd are some")
        # an optimizer computes with both, and with their product, in float32, whose largest number is 3e38
        if not 0 < self.learning_rate <= 1e30:
            what = f"must be positive and at most 1e30, got {self.learning_rate}; 1e-3 is usual for AdamW"
            raise ArgumentError("learning_rate", what)
        if not 0 <= self.weight_decay <= 1e6:
            raise ArgumentError("weight_decay", f"must be in 0..1e6, got {self.weight_decay}; 0 turns it off")
        if betas is not None and not (len(betas) in (2, 3) and all(0 <= beta < 1 for beta in betas)):
            raise ArgumentError("betas", f"must be two numbers in 0..1 (1 excluded), got {betas}; [0.9, 0.98] is usual")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            what = f"must be in 0..1 (0 excluded), got {self.layer_decay}; 0.75 is usual"
            raise ArgumentError("layer_decay", what)
        if not 0 <= self.warmup_fraction < 1:
            what = f"must be in 0..1 (1 excluded), got {self.warmup_fraction}; 0 turns it off"
            raise ArgumentError("warmup_fraction", what)
        if not isinstance(self.schedule, str):
            _try_scheduler(self.schedule)
        elif self.schedule not in _COURSES:
            raise ArgumentError("schedule", f"must be one of {', '.join(_COURSES)}, got {self.schedule!r}; choose one")

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer, with weight decay on matrices but not on norms and biases.

        Args:
            model: The model to train. Its ``no_weight_decay()`` names parameters without decay, ``learning_rates()``
                names parameters with their own rates, and ``group_matcher`` names the blocks.

        Raises:
            SettingError: If the optimizer has another number of betas, or cannot be made on this machine.
        """
        name, betas = self.optimizer, self.betas
        info = get_optimizer_info(name)
        wanted = info.num_betas if info.has_betas else 0
        if betas is not None and len(betas) != wanted:  # if wanted is 0, timm would silently ignore them
            raise SettingError(f"model.betas: {name} has {wanted}, got {len(betas)}; leave them out, or choose adamw")
        options: dict[str, Any] = {} if betas is None else {"betas": tuple(betas)}
        options |= {"lr": self.learning_rate, "weight_decay": self.weight_decay, "layer_decay": self.layer_decay}
        if _is_fused(name, model):
            options["fused"] = True
        try:
            optimizer = create_optimizer_v2(model, name, **options)
        except (AssertionError, ImportError, RuntimeError) as error:  # some of timm's optimizers need other packages
            why = str(error).split("\n")[0] or "it needs a GPU or another package"
            what = f"{name} cannot be made here ({why}); adamw works everywhere"
            raise SettingError(f"model.optimizer: {what}") from error
        own = _own_rates(model, self.learning_rate)
        for group in [*optimizer.param_groups]:  # weights with other rates leave the group for new ones
            of_rate: dict[float | None, list[nn.Parameter]] = {}
            for weight in group["params"]:
                of_rate.setdefault(own.get(weight), []).append(weight)
            group["params"], *others = of_rate.values()
            for weights in others:
                optimizer.add_param_group({**group, "params": weights})
        leave_unscaling_to_lightning(optimizer)
        set_rates(model, optimizer, self.learning_rate)
        return optimizer

    def make_schedule(self, optimizer: Optimizer, end: Lengths | Callable[[], float]) -> dict[str, Any]:
        """The schedule of the learning rate, in the form that Lightning takes.

        Args:
            optimizer: What it schedules.
            end: The lengths of the training; or, if a clock ends it, a function that returns the share that is done.

        Raises:
            SettingError: If the schedule needs an end and there is none, or if it ends before the training.
        """
        if not isinstance(self.schedule, str):
            assert isinstance(end, tuple)  # Timed refuses such a schedule
            return _torch_scheduler(optimizer, self.schedule, *end)
        course, fraction = _COURSES[self.schedule], self.warmup_fraction
        if isinstance(end, tuple) and math.isinf(end[1]):
            what = "the learning rate schedule needs an end; give it, or trainer.max_steps"
            raise SettingError(f"trainer.max_epochs: {what}")
        whole, first = (end[1], 1) if isinstance(end, tuple) else (1, 0)
        warmup = max(1, round(whole * fraction)) if isinstance(end, tuple) else fraction

        def factor(step: int) -> float:
            done = step if isinstance(end, tuple) else end()
            if done < warmup:
                return (done + first) / warmup
            return course(min((done - warmup) / (whole - warmup or 1), 1.0))

        return {"scheduler": _Course(optimizer, factor), "interval": "step", "frequency": 1}


def _is_fused(name: str, model: nn.Module) -> bool:
    """Whether one kernel steps all weights: on a GPU, with those of torch's optimizers that have such a kernel."""
    is_on_gpu = any(weight.is_cuda for weight in model.parameters())
    return is_on_gpu and "fused" in inspect.signature(get_optimizer_class(name, bind_defaults=False)).parameters


def set_rates(model: nn.Module, optimizer: Optimizer, learning_rate: float) -> None:
    """Set the rate of each group: this one, or its weights' own rate, times the group's factor if it has one."""
    own = _own_rates(model, learning_rate)
    for group in optimizer.param_groups:
        rate = own.get(group["params"][0], learning_rate) if group["params"] else learning_rate
        group["lr"] = group["initial_lr"] = rate * group.get("lr_scale", 1.0)


def _own_rates(model: Any, learning_rate: float) -> dict[nn.Parameter, float]:
    """The rates of the weights that the model's ``learning_rates()`` names, if it has that method."""
    rates = model.learning_rates(learning_rate) if hasattr(model, "learning_rates") else {}
    return {weight: rates[name] for name, weight in model.named_parameters() if name in rates}


class _Course(LambdaLR):
    """LambdaLR with one function for all current groups of the optimizer. A group that a callback adds later
    (BackboneFinetuning) keeps the rate that the callback gives it. LambdaLR itself would raise an error."""

    def get_lr(self) -> list[Any]:
        factor = self.lr_lambdas[0](self.last_epoch)
        rates: list[Any] = [peak * factor for peak in self.base_lrs]
        return rates + [group["lr"] for group in self.optimizer.param_groups[len(rates) :]]


def _try_scheduler(described: Mapping[str, Any]) -> None:
    """Make one of torch's schedulers and step it once, because some check their arguments only then."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = _torch_scheduler(optimizer, described, 1, 0, 0)["scheduler"]
    optimizer.step()
    metrics = [0.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
    _refusing(described, partial(scheduler.step, *metrics))


def _refusing(described: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # torch's schedulers raise ZeroDivisionError, NotImplementedError and others
        what = f"must have arguments that {described['scheduler']} takes, got {str(error) or dict(described)}"
        raise ArgumentError("schedule", f"{what}; see torch") from error


def _torch_scheduler(
    optimizer: Optimizer, described: Mapping[str, Any], batches: float, num_steps: float, num_epochs: float
) -> dict[str, Any]:
    """One of torch's schedulers, described by its name as ``scheduler``, its arguments, ``interval`` (epoch or step),
    and the metric to ``monitor`` if it needs one.

    A scheduler that counts epochs is stepped with the last batch of an epoch. Lightning would step it only after the
    checkpoint at the epoch's end was saved, and a resumed training would have an old rate.
    """
    arguments = dict(described)
    name, interval = arguments.pop("scheduler", None), arguments.pop("interval", "epoch")
    monitor = arguments.pop("monitor", None)
    kind = getattr(lr_scheduler, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)) or interval not in ("epoch", "step"):
        what = f"must be {', '.join(_COURSES)}, or a class of torch.optim.lr_scheduler as scheduler"
        raise ArgumentError("schedule", f"{what}, got {dict(described)}; {{scheduler: StepLR, step_size: 10}} is one")
    scheduler = _refusing(described, partial(kind, optimizer, **arguments))
    moves, most = num_epochs if interval == "epoch" else num_steps, getattr(scheduler, "total_steps", math.inf)
    if moves > most:  # OneCycleLR would raise an error there
        what = f"{name} ends after {most} {interval}s, and the training has {moves}"
        raise SettingError(f"model.schedule: {what}; give total_steps: {moves}")
    config = {"scheduler": scheduler, "interval": "step", "frequency": 1}
    if interval == "epoch":
        config |= {"interval": "epoch"} if math.isinf(batches) else {"frequency": batches}
    return config if monitor is None else {**config, "monitor": monitor}
