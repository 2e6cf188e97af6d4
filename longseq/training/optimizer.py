"""The optimizer and the learning rate schedule."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR

from longseq.arguments import ArgumentError, SettingError

# How a learning rate goes on after its warm-up: its share of the peak at a share of the steps.
COURSES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "step": lambda progress: 0.1 ** ((progress >= 0.5) + (progress >= 0.75)),
    "restarts": lambda progress: 0.5 * (1 + math.cos(math.pi * (4 * progress % 1))),
}
CourseName = Literal["cosine", "constant", "linear", "step", "restarts"]


def refuse_wrong_optimizer(
    name: str, learning_rate: float, weight_decay: float, betas: Sequence[float] | None, layer_decay: float | None
) -> None:
    """Refuse what no optimizer can use.

    Raises:
        ValueError: If timm has no such optimizer, or a number is out of its range.
    """
    if name not in list_optimizers() or name == "adahessian":  # it needs second derivatives
        raise ArgumentError("optimizer", f"must be one of timm's, got {name!r}; adamw, lamb, lion and sgd are some")
    # an optimizer computes with both, and with their product, in float32, whose largest number is 3e38
    if not 0 < learning_rate <= 1e30:
        raise ArgumentError(
            "learning_rate", f"must be positive and at most 1e30, got {learning_rate}; 1e-3 is usual for AdamW"
        )
    if not 0 <= weight_decay <= 1e6:
        raise ArgumentError("weight_decay", f"must be in 0..1e6, got {weight_decay}; 0 turns it off")
    if betas is not None and not (len(betas) in (2, 3) and all(0 <= beta < 1 for beta in betas)):
        raise ArgumentError("betas", f"must be two numbers in 0..1 (1 excluded), got {betas}; [0.9, 0.98] is usual")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ArgumentError("layer_decay", f"must be in 0..1 (0 excluded), got {layer_decay}; 0.75 is usual")


def make_optimizer(
    model: nn.Module,
    name: str,
    learning_rate: float,
    weight_decay: float,
    betas: Sequence[float] | None = None,
    layer_decay: float | None = None,
) -> Optimizer:
    """Any optimizer that timm knows, with weight decay on matrices but not on norms and biases.

    Args:
        model: Its parameters are optimised; those that its ``no_weight_decay()`` names are not decayed, and those that
            its ``learning_rates()`` names have rates of their own.
        name: One of ``timm.optim.list_optimizers()``.
        learning_rate: The peak of the schedule.
        weight_decay: For matrices.
        betas: Decay of the running means of gradients and of their squares; None takes the optimizer's own.
        layer_decay: Each block has the rate of the next one times this; the model's ``group_matcher`` says which
            parameters are whose. None gives all the same rate.

    Raises:
        SettingError: If the optimizer has another number of betas, or cannot be made on this machine.
    """
    options: dict[str, Any] = {} if betas is None else {"betas": tuple(betas)}
    info = get_optimizer_info(name)
    wanted = info.num_betas if info.has_betas else 0
    if betas is not None and len(betas) != wanted:  # where wanted is 0, timm would leave them out without a word
        raise SettingError(f"model.betas: {name} has {wanted}, got {len(betas)}; leave them out, or choose adamw")
    if layer_decay is not None:
        options["layer_decay"] = layer_decay
    try:
        optimizer = create_optimizer_v2(model, name, lr=learning_rate, weight_decay=weight_decay, **options)
    except (AssertionError, ImportError, RuntimeError) as error:  # some of timm's optimizers need other packages
        why = str(error).split("\n")[0] or "it needs a GPU or another package"
        raise SettingError(f"model.optimizer: {name} cannot be made here ({why}); adamw works everywhere") from error
    own = _own_rates(model, learning_rate)
    for group in [*optimizer.param_groups]:  # weights with other rates leave the group for new ones
        of_rate: dict[float | None, list[nn.Parameter]] = {}
        for weight in group["params"]:
            of_rate.setdefault(own.get(weight), []).append(weight)
        group["params"], *others = of_rate.values()
        for weights in others:
            optimizer.add_param_group({**group, "params": weights})
    set_rates(model, optimizer, learning_rate)
    return optimizer


def set_rates(model: nn.Module, optimizer: Optimizer, learning_rate: float) -> None:
    """Give each group its rate: this one or the weights' own, times the group's own factor if it has one."""
    own = _own_rates(model, learning_rate)
    for group in optimizer.param_groups:
        rate = own.get(group["params"][0], learning_rate) if group["params"] else learning_rate
        group["lr"] = group["initial_lr"] = rate * group.get("lr_scale", 1.0)


def _own_rates(model: Any, learning_rate: float) -> dict[nn.Parameter, float]:
    """The rates of the weights that the model's ``learning_rates()`` names, if it has that method."""
    rates = model.learning_rates(learning_rate) if hasattr(model, "learning_rates") else {}
    return {weight: rates[name] for name, weight in model.named_parameters() if name in rates}


class Course(LambdaLR):
    """LambdaLR with one function for all groups that the optimizer has now. A group that a callback adds later
    (BackboneFinetuning) keeps the rate that the callback gives it; LambdaLR itself would raise an error."""

    def get_lr(self) -> list[Any]:
        factor = self.lr_lambdas[0](self.last_epoch)
        rates: list[Any] = [peak * factor for peak in self.base_lrs]
        return rates + [group["lr"] for group in self.optimizer.param_groups[len(rates) :]]


def warmup_course(optimizer: Optimizer, num_steps: int | float, warmup_fraction: float, name: str) -> Course:
    """Rise linearly for a fraction of the steps, then go on as COURSES says; one step for each update.

    Raises:
        SettingError: If the number of steps is infinite.
    """
    if math.isinf(num_steps):
        raise SettingError("trainer.max_epochs: the learning rate schedule needs an end; give it, or trainer.max_steps")
    num_warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        return COURSES[name](min((step - num_warmup) / max(1, num_steps - num_warmup), 1.0))

    return Course(optimizer, factor)


def timed_course(optimizer: Optimizer, progress: Callable[[], float], warmup_fraction: float, name: str) -> Course:
    """As warmup_course, where not the steps but a clock says which share of the training is done."""

    def factor(step: int) -> float:
        done = progress()
        if done < warmup_fraction:
            return done / warmup_fraction
        return COURSES[name](min((done - warmup_fraction) / (1 - warmup_fraction), 1.0))

    return Course(optimizer, factor)


def refuse_wrong_schedule(schedule: str | Mapping[str, Any], warmup_fraction: float) -> None:
    """Refuse a schedule that there is not. One of torch's schedulers is made and moved once: some refuse their
    arguments only then.

    Raises:
        ValueError: If there is no such schedule, it refuses its arguments, or the fraction is out of its range.
    """
    if not 0 <= warmup_fraction < 1:
        what = f"must be in 0..1 (1 excluded), got {warmup_fraction}; 0 turns it off"
        raise ArgumentError("warmup_fraction", what)
    if isinstance(schedule, str):
        if schedule not in COURSES:
            raise ArgumentError("schedule", f"must be one of {', '.join(COURSES)}, got {schedule!r}; choose one")
        return
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch_scheduler(optimizer, schedule)["scheduler"]
    optimizer.step()
    with _refusing(schedule):
        scheduler.step(*[0.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])


@contextmanager
def _refusing(described: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ZeroDivisionError, NotImplementedError and others, as torch's arithmetic comes
        what = f"must have arguments that {described['scheduler']} takes, got {str(error) or dict(described)}"
        raise ArgumentError("schedule", f"{what}; see torch") from error


def torch_scheduler(
    optimizer: Optimizer,
    described: Mapping[str, Any],
    steps_of_epoch: int | float = 1,
    num_steps: int | float = 0,
    num_epochs: int | float = 0,
) -> dict[str, Any]:
    """One of torch's schedulers, in the form that Lightning takes.

    A scheduler of epochs is one of steps that moves with the last batch of an epoch: Lightning would move it after the
    checkpoint at the epoch's end was saved, and a resumed training would have an old rate.

    Args:
        optimizer: What it schedules.
        steps_of_epoch: Batches of an epoch; infinite if they are not known.
        num_steps: Optimizer steps of the training.
        num_epochs: Whole epochs of the training.
        described: Its name as ``scheduler``, its arguments, ``interval`` (epoch or step; epoch if absent), and the
            metric to ``monitor`` if it needs one.

    Raises:
        ValueError: If there is no such scheduler, or it refuses its arguments.
        SettingError: If it ends before the training.
    """
    arguments = dict(described)
    name, interval = arguments.pop("scheduler", None), arguments.pop("interval", "epoch")
    monitor = arguments.pop("monitor", None)
    kind = getattr(lr_scheduler, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)) or interval not in ("epoch", "step"):
        what = f"must be {', '.join(COURSES)}, or a class of torch.optim.lr_scheduler as scheduler"
        raise ArgumentError("schedule", f"{what}, got {dict(described)}; {{scheduler: StepLR, step_size: 10}} is one")
    with _refusing(described):
        scheduler = kind(optimizer, **arguments)
    moves, most = num_epochs if interval == "epoch" else num_steps, getattr(scheduler, "total_steps", math.inf)
    if moves > most:  # OneCycleLR would raise an error there
        what = f"{name} ends after {most} {interval}s, and the training has {moves}"
        raise SettingError(f"model.schedule: {what}; give total_steps: {moves}")
    config = {"scheduler": scheduler, "interval": "step", "frequency": 1}
    if interval == "epoch":
        config |= {"interval": "epoch"} if math.isinf(steps_of_epoch) else {"frequency": steps_of_epoch}
    return config if monitor is None else {**config, "monitor": monitor}
