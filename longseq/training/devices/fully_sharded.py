"""Training with each weight split over several devices: a Lightning strategy."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins.collectives.torch_collective import default_pg_timeout
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.strategies import ModelParallelStrategy, Strategy, StrategyRegistry
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from longseq.arguments import ArgumentError
from longseq.compat.lightning import callbacks_of
from longseq.compat.torch import is_compiled
from longseq.files.checkpoint import WholeCheckpoints
from longseq.files.parts import write_sharded
from longseq.training.board.summary import summary
from longseq.training.classifier import Classifier
from longseq.training.devices.sequence_parallel import ELEMENTWISE, refuse_callbacks
from longseq.training.flops import flops_per_sample
from longseq.training.quantisation import QuantizationAwareTraining

# Optimizers whose step on sharded weights equals the step on whole ones; muon's does not.
_OPTIMIZERS = (*ELEMENTWISE, "lamb", "lars")
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
# Callbacks that copy the model, or change it or what is trained after it was sharded.
_COPYING = (
    WeightAveraging, StochasticWeightAveraging, BaseFinetuning, LearningRateFinder, BatchSizeFinder,
    QuantizationAwareTraining,
)  # fmt: skip


class FullySharded(ModelParallelStrategy):
    """Each device holds a part of each weight, of its gradient and of the optimizer's moments (FSDP2).

    Each device has its own samples, as with ddp. The weights of a block are gathered before it runs and freed after it.
    Weights that blocks share (sharing ``layerwise``), the embedding, the norms and the head are one group, which is
    gathered once a step. By default a checkpoint is the same file as from one device, and any number of devices can
    resume from it.

    Args:
        save_distributed_checkpoint: Whether a checkpoint is a folder to which each process writes its own parts
            (torch.distributed.checkpoint). Nothing is gathered then. All commands read it like a file.
        process_group_backend: As ModelParallelStrategy takes it.
        timeout: As ModelParallelStrategy takes it.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__("auto", 1, save_distributed_checkpoint, process_group_backend, timeout)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        model: Any = self.lightning_module
        assert isinstance(model, Classifier)
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_unsharded_training(trainer, model)
        if not isinstance(model, FSDPModule):
            before = flops_per_sample(model), summary(model)
            self.precision_plugin.convert_module(model)  # in place
            shard_weights(model, self.device_mesh["data_parallel"])
            model.before_sharding = before
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        for loop in (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # weights that are gathered in it can never be trained
        if not callbacks_of(trainer, SameBatches):
            trainer.callbacks.append(SameBatches())  # type: ignore[attr-defined]  # the last, because others may meet the other ranks after a batch
        Strategy.setup(self, trainer)  # ModelParallelStrategy's wants the model to shard itself

    def lightning_module_state_dict(self) -> dict[str, Any]:
        model: Any = self.lightning_module
        saved: dict[int, Any] = {}  # a weight with several names is saved once
        state = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in saved:
                saved[id(value)] = self._to_save(value.detach())
            state[name] = saved[id(value)]
        return state if self._save_distributed_checkpoint or self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state = tree_map(self._to_save, Strategy.optimizer_state(self, optimizer))
        return state if self._save_distributed_checkpoint or self.is_global_zero else {}

    def _to_save(self, value: Any) -> Any:
        """What this process saves of a value: its part, or the whole on the first process and None on the others."""
        if self._save_distributed_checkpoint or not isinstance(value, Tensor):
            return value
        whole = value.full_tensor() if isinstance(value, DTensor) else value  # all processes give their parts
        return whole.cpu() if self.is_global_zero else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike, storage_options: Any = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        if self._save_distributed_checkpoint:
            write_sharded(checkpoint, path)
        else:
            Strategy.save_checkpoint(self, checkpoint, path, storage_options)

    def load_checkpoint(self, checkpoint_path: str | PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        io = self.checkpoint_io if isinstance(self.checkpoint_io, WholeCheckpoints) else WholeCheckpoints()
        return io.load_checkpoint(self.broadcast(checkpoint_path))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        model: Any = self.lightning_module
        ours = model.state_dict()
        state = {name: _part_of(value, ours.get(name)) for name, value in checkpoint["state_dict"].items()}
        model.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            parts = {
                number: {name: _part_of(value, weights[number]) for name, value in moments.items()}
                for number, moments in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})


class SameBatches(pl.Callback):
    """A rank with fewer batches to evaluate than the others runs its last one again, because the others need its parts
    of the weights."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._compare(counts, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare(trainer.num_test_batches, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare(trainer.num_predict_batches, pl_module)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        for _again in range(self._missing_after(batch_idx)):
            pl_module(batch[0])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        for _again in range(self._missing_after(batch_idx)):
            pl_module.predict_step(batch, batch_idx)

    def _compare(self, counts: Sequence[int | float], model: pl.LightningModule) -> None:
        self._own = int(sum(counts))
        extremes = torch.tensor([self._own, -self._own], device=model.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        self._most, fewest = int(extremes[0]), -int(extremes[1])
        if self._most and not fewest:
            what = f"must be at most the number of samples to evaluate, got {dist.get_world_size()}"
            raise ArgumentError("trainer.devices", f"{what}; lower it, or give --trainer.strategy ddp")

    def _missing_after(self, batch_idx: int) -> int:
        return self._most - self._own if batch_idx + 1 == self._own else 0


StrategyRegistry.register("fullysharded", FullySharded, "Each device holds a part of every weight (FSDP2).")


def shard_weights(model: Classifier, mesh: Any) -> None:
    """Give each process of a mesh its part of each weight, in place. A model that was built on the meta device gets its
    weights from the first process, block by block.

    Args:
        model: A classifier, the same on each process; it may be on the meta device on all except the first.
        mesh: The processes, in one dimension.

    Raises:
        ValueError: If a weight is one number, which cannot be divided.
    """
    for name, weight in model.named_parameters():
        if weight.ndim == 0:
            raise ArgumentError("trainer.strategy", f"must leave {name} whole, which is one number; give ddp")
    blocks: list[Any] = list(model.encoder.trunk.blocks)  # type: ignore[arg-type]
    holders = Counter(id(weight) for block in blocks for weight in block.parameters())
    inside = "encoder.trunk.blocks."
    of_blocks = model.named_parameters(remove_duplicate=False)
    holders.update({id(weight) for name, weight in of_blocks if not name.startswith(inside)})
    own = {weight for block in blocks for weight in block.parameters() if holders[id(weight)] == 1}
    # the root comes first: a weight that blocks share is under its hooks, which run once a step
    _shard(model, mesh, ignored=own, receives=model.built_on_meta)
    for block in blocks:
        others = {weight for weight in block.parameters() if isinstance(weight, DTensor)}
        _shard(block, mesh, ignored=others, receives=model.built_on_meta)
    register_fsdp_forward_method(model, "predict_step")  # it also calls parts of the model by themselves
    encoder = model.encoder
    encoder._is_measured = (
        encoder._is_measured or encoder._has_statistics()
    )  # statistics may have come from a checkpoint


def _shard(module: nn.Module, mesh: Any, ignored: set[Any], receives: bool) -> None:
    if receives:
        _receive(module, mesh, ignored)
    fully_shard(module, mesh=mesh, ignored_params=ignored)


@torch.no_grad()
def _receive(module: nn.Module, mesh: Any, ignored: set[Any]) -> None:
    """Replace all weights and buffers, except the ignored ones, by those of the first process, on the mesh's device."""
    received: dict[int, Tensor] = {}
    for part in module.modules():
        for of_part in (part._parameters, part._buffers):
            for name, value in of_part.items():
                if value is None or value in ignored or isinstance(value, DTensor):
                    continue
                if id(value) not in received:
                    place = mesh.device_type
                    whole = torch.empty_like(value, device=place) if value.is_meta else value.detach().to(place)
                    dist.broadcast(whole, group_src=0, group=mesh.get_group())
                    is_weight = isinstance(value, nn.Parameter)
                    received[id(value)] = nn.Parameter(whole, value.requires_grad) if is_weight else whole
                of_part[name] = received[id(value)]  # type: ignore[assignment]


def _part_of(whole: Any, ours: Any) -> Any:
    """This process's part of a value that has a weight's shape; any other value is returned as it is."""
    if not isinstance(ours, DTensor) or not isinstance(whole, Tensor) or whole.shape != ours.shape:
        return whole
    return distribute_tensor(whole.to(ours.device), ours.device_mesh, ours.placements, src_data_rank=None)


def _refuse_unsharded_training(trainer: pl.Trainer, model: Classifier) -> None:
    """Check that nothing in a training needs whole weights.

    Raises:
        ValueError: If something does.
    """
    where = "where weights are sharded"
    if model.optimizer not in _OPTIMIZERS:
        what = f"must be one of {', '.join(_OPTIMIZERS)} {where}, got {model.optimizer}"
        raise ArgumentError("model.optimizer", f"{what}; adamw is usual")
    if str(trainer.precision) not in _PRECISIONS:
        what = f"must be one of {', '.join(_PRECISIONS)} {where}, got {trainer.precision}"
        raise ArgumentError("trainer.precision", f"{what}; give bf16-mixed")
    if is_compiled(model.encoder):
        raise ArgumentError("model.compile", f"must be false {where}; leave it out")
    if model.encoder.reversible:  # the hooks that gather a block's weights run when the block is called
        raise ArgumentError("model.encoder.reversible", f"must be false {where}; leave it out")
    refuse_callbacks(trainer, *_COPYING)
    if model.bad_steps.allowed and trainer.accumulate_grad_batches > 1:
        what = f"must be 0 {where} and gradients are accumulated, got {model.bad_steps.allowed}"
        raise ArgumentError("skip_bad_steps", f"{what}; leave out one of the two")
    if not (model.encoder._is_measured or model.encoder._has_statistics() or model.encoder.mean.is_meta):
        what = "must be measured before the training: each process would measure a batch of its own"
        raise ArgumentError("encoder", f"{what}; call encoder.measure(batches)")
