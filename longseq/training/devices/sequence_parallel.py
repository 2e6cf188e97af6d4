"""Training with the tokens of each sequence split over several devices: a Lightning strategy."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from longseq.arguments import ArgumentError, require_positive
from longseq.attention.shard import Split
from longseq.compat.lightning import callbacks_of
from longseq.compat.torch import is_compiled
from longseq.encoders.sharding import Sharding
from longseq.training.board.summary import summary
from longseq.training.classifier import Classifier
from longseq.training.flops import flops_per_sample
from longseq.training.quantisation import QuantizationAwareTraining

# Optimizers whose step for a weight does not depend on the other weights of its matrix: columns can be updated apart.
ELEMENTWISE = ("adam", "adamw", "nadam", "nadamw", "radam", "adamax", "lion", "sgd", "momentum", "rmsprop")


class SequenceParallel(DDPStrategy):
    """The devices of a group split the tokens of each sequence, and the groups split the samples of a batch.

    Linformer's E X and Verma's L' X are sums over tokens. So each device has some rows of the token grid, and the only
    communication is an all-reduce of k x d per layer, whatever the length. Each device holds and trains the columns of
    E of its own tokens. A checkpoint is the same file as from one device, and any number of devices can resume from it.

    Args:
        tokens: How many devices split a sequence; it must divide the number of devices.
        kwargs: As DDPStrategy takes them.
    """

    def __init__(self, tokens: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_positive("2 devices share a sequence then", tokens=tokens)
        self.tokens = tokens
        self.data_group: Any = None  # the processes that have the same rows of other samples
        self._token_group: Any = None
        self._sharding: Sharding | None = None

    def setup_distributed(self) -> None:
        super().setup_distributed()
        world, rank = self.world_size, self.global_rank
        if world % self.tokens:
            what = f"must divide the {world} devices, got {self.tokens}; change trainer.devices"
            raise ArgumentError("trainer.strategy.tokens", what)
        for begin in range(0, world, self.tokens):  # every process makes all groups
            group = dist.new_group(range(begin, begin + self.tokens))
            self._token_group = group if rank // self.tokens * self.tokens == begin else self._token_group
        for place in range(self.tokens):
            group = dist.new_group(range(place, world, self.tokens))
            self.data_group = group if rank % self.tokens == place else self.data_group

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The processes of a group get the same samples."""
        return {"num_replicas": self.world_size // self.tokens, "rank": self.global_rank // self.tokens}

    def setup(self, trainer: pl.Trainer) -> None:
        model: Any = self.lightning_module
        assert isinstance(model, Classifier)
        if self._sharding is None:
            refuse_callbacks(trainer, WeightAveraging, StochasticWeightAveraging, QuantizationAwareTraining)
            self._shard(model)
        super().setup(trainer)

    def _shard(self, model: Classifier) -> None:
        if model.optimizer not in ELEMENTWISE:
            what = f"must be one of {', '.join(ELEMENTWISE)} where E is shared out, got {model.optimizer}"
            raise ArgumentError("model.optimizer", f"{what}; adamw is usual")
        if is_compiled(model.encoder):
            raise ArgumentError("model.compile", "must be false where devices share a sequence; leave it out")
        before = flops_per_sample(model), summary(model)
        try:
            self._sharding = Sharding(model.encoder, self._token_group)
        except ArgumentError as error:
            where = "model.encoder" if error.argument == "encoder" else f"model.encoder.{error.argument}"
            raise ArgumentError(where, error.what) from error
        model.before_sharding = before
        model.task.shard = self._sharding.shard
        for part in model.modules():
            if isinstance(part, Split):
                part.shard = self._sharding.shard
        model._ddp_params_and_buffers_to_ignore = list(self._sharding.names(model))  # type: ignore[assignment]
        for weight in self._sharding.weights:
            if weight.requires_grad:
                weight.register_hook(self._mean_gradient)
        for metric in model.modules():
            if isinstance(metric, Metric):
                metric.process_group = self.data_group  # a group's processes count the same samples

    def _mean_gradient(self, gradient: Tensor) -> Tensor:
        """The mean over the samples of all processes; the processes of a group have the same loss."""
        gradient = gradient / self.world_size
        dist.all_reduce(gradient, group=self.data_group)
        return gradient

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        weights = [weight for weight in self.precision_plugin.main_params(optimizer) if weight.grad is not None]
        norm = self.gradient_norm(weights)
        torch.nn.utils.clip_grads_with_norm_(weights, clip_val, norm)

    def gradient_norm(self, weights: list[Any]) -> Tensor:
        """The norm of the gradients of some weights; of some of these a process has only its own columns."""
        ours = [] if self._sharding is None else self._sharding.weights
        shared_out = [any(weight is own for own in ours) for weight in weights]
        exact = torch.promote_types(weights[0].dtype if weights else torch.float32, torch.float32)  # none in a bad step
        squares = torch.zeros(2, device=self.root_device, dtype=exact)
        for weight, is_own in zip(weights, shared_out, strict=True):
            squares[int(is_own)] += weight.grad.detach().to(exact).square().sum()
        dist.all_reduce(squares[1:], group=self._token_group)
        return squares.sum().sqrt()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        model: Any = self.lightning_module
        return model.state_dict() if self._sharding is None else self._sharding.whole_state(model)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._sharding is not None:
            model: Any = self.lightning_module
            checkpoint = {**checkpoint, "state_dict": self._sharding.own_state(model, checkpoint["state_dict"])}
        super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        assert self._sharding is not None
        return self._sharding.whole_moments(inner)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._sharding is not None
        states = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        own = [self._sharding.own_moments(optimizer, state) for optimizer, state in states]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})


def refuse_callbacks(trainer: pl.Trainer, *kinds: type) -> None:
    """Check that no callback copies the model, or changes it or what is trained, after the weights were shared out.

    Raises:
        ValueError: If one does.
    """
    for callback in callbacks_of(trainer, *kinds):
        what = f"must not hold {type(callback).__name__} where weights are sharded: it needs the whole model"
        raise ArgumentError("trainer.callbacks", f"{what}; leave it out, or give --trainer.strategy ddp")


StrategyRegistry.register("sequenceparallel", SequenceParallel, "Two devices share the tokens of a sequence.", tokens=2)


def gradient_norm(trainer: pl.Trainer, weights: list[Any]) -> Tensor:
    """The norm of the gradients of some weights, over all devices that hold parts of them."""
    if isinstance(trainer.strategy, SequenceParallel):
        return trainer.strategy.gradient_norm(weights)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of weights that are sharded
