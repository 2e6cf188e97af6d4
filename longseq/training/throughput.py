"""The speed of training, measured from one logged step to the next over all ranks."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.throughput import Throughput
from torch import Tensor

from longseq.arguments import require_positive
from longseq.training.classifier import Classifier
from longseq.training.devices.processes import copies
from longseq.training.flops import flops_per_sample, peak_flops

clock = time.perf_counter


class ThroughputLogger(pl.Callback):
    """Log how many samples per second training processes, and what slows it down, as throughput/...:

    - samples_per_second, tokens_per_second: summed over ranks, padding not counted;
    - step_ms: time of an optimizer step with all its batches, the mean over steps and ranks;
    - data_wait_ms: the part of step_ms from the end of a batch to the start of the next, in which the host waits for
      the loader, copies the batch, and runs other callbacks and loggers;
    - peak_memory_gib: peak memory of the rank that used most, since its process began: on CUDA the memory that torch
      allocated, elsewhere the resident memory of the process (getrusage);
    - processor_percent: how busy the machine's processors are; gpu_percent: how busy the GPUs are, if the package
      nvidia-ml-py is installed;
    - mfu: training FLOPs per second (flops.py), including a teacher's forward pass, as a share of the device's peak, if
      that is known. A shorter sample counts by its share of the tokens.

    A value covers the steps since the last logged one. It leaves out the first step, which allocates and compiles,
    validation, checkpoints, and the loading of the batch after them. If training ends before anything was logged, its
    steps are logged then. This callback waits for the device only at logged steps, after the first step, and when the
    clock stops.

    Args:
        peak_flops: Peak FLOP/s of one device in the precision of the training; None takes the value in flops.py.

    Raises:
        ValueError: If peak_flops is not positive.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        super().__init__()
        if peak_flops is not None:
            require_positive("an H200 has 989e12 in bfloat16", peak_flops=peak_flops)
        self.peak_flops = peak_flops
        self._since: float | None = None  # when time was last counted; None while the clock is stopped

    def on_train_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        device = pl_module.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak = self.peak_flops or peak_flops(name, str(trainer.precision))
        self._flops = flops_per_sample(pl_module).training if self._peak else 0
        self._log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by one of its connectors
        self._throughput = Throughput(window_size=2)  # from one logged step to the next
        self._global_step = trainer.global_step
        self._steps = -1  # optimizer steps, without the first one
        self._window_start = 0  # the step after which the window began
        # the tokens of padded batches become a tensor on the device, so that nothing waits for the device
        self._samples, self._tokens = 0, 0
        self._seconds = self._waited = 0.0
        self._since = None
        psutil.cpu_percent()  # it counts from one call to the next

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._since = clock()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Classifier, batch: Any, batch_idx: int) -> None:
        self._waited += self._advance()
        self._since = self._since or clock()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Classifier, outputs: Any, batch: Sequence[Any], batch_idx: int
    ) -> None:
        self._advance()
        self._samples += len(batch[1]) / copies(trainer)  # a sample that several devices share counts once
        self._tokens = self._tokens + pl_module.encoder.count_tokens(batch[0])  # int: float32 is exact to 16 million
        if trainer.global_step == self._global_step:  # gradients accumulate: no step was taken
            return
        self._global_step = trainer.global_step
        self._steps += 1
        if self._steps == 0:
            wait_for(pl_module.device)
            self._since, self._seconds, self._samples = clock(), 0.0, 0
            self._tokens = 0
            self._begin_window(pl_module)
        elif self._log_every and trainer.global_step % self._log_every == 0:
            samples_per_second = self._log(trainer, pl_module)
            # a tensor on the host: the progress bar reads it after every step
            pl_module.log("samples/s", torch.tensor(float(round(samples_per_second))), prog_bar=True, logger=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._stop_clock(pl_module)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Classifier, checkpoint: dict[str, Any]) -> None:
        self._stop_clock(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        self._stop_clock(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Classifier) -> None:
        if self._steps > 0 and self._window_start == 0 and self._log_every:
            self._log(trainer, pl_module)

    def _advance(self) -> float:
        """Count the time since it was last counted, unless the clock is stopped, and return that time."""
        if self._since is None:
            return 0.0
        now = clock()
        passed, self._since = now - self._since, now
        self._seconds += passed
        return passed

    def _stop_clock(self, pl_module: Classifier) -> None:
        if self._since is not None:
            wait_for(pl_module.device)
            self._advance()
            self._since = None

    def _begin_window(self, pl_module: Classifier) -> None:
        tokens = int(self._tokens) // copies(pl_module.trainer)
        samples = int(self._samples)
        self._throughput.update(time=self._seconds, batches=self._steps, samples=samples, lengths=tokens)
        self._window_start, self._waited = self._steps, 0.0

    def _log(self, trainer: pl.Trainer, pl_module: Classifier) -> float:
        """Log the window, begin the next one, and return the samples per second of all ranks."""
        wait_for(pl_module.device)
        self._advance()
        wait_ms = 1000 * self._waited / (self._steps - self._window_start)
        self._begin_window(pl_module)
        rates = self._throughput.compute()
        of_rank: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
            "samples_per_second": (rates["device/samples_per_sec"], torch.sum),
            "tokens_per_second": (rates["device/items_per_sec"], torch.sum),
            "step_ms": (1000 / rates["device/batches_per_sec"], torch.mean),
            "data_wait_ms": (wait_ms, torch.mean),
            "peak_memory_gib": (peak_memory_gib(pl_module.device), torch.amax),
            "processor_percent": (psutil.cpu_percent(), torch.mean),
        }
        if pl_module.device.type == "cuda" and find_spec("pynvml"):
            of_rank["gpu_percent"] = (float(torch.cuda.utilization(pl_module.device)), torch.mean)
        if self._peak:
            full_samples_per_second = rates["device/items_per_sec"] / pl_module.encoder.num_tokens
            of_rank["mfu"] = (full_samples_per_second * self._flops / self._peak, torch.mean)
        values = torch.tensor([value for value, _ in of_rank.values()], device=pl_module.device)
        of_ranks = trainer.strategy.all_gather(values).reshape(-1, len(values)).cpu()
        metrics = {
            f"throughput/{name}": combine(column).item()
            for (name, (_, combine)), column in zip(of_rank.items(), of_ranks.T, strict=True)
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # Lightning's own axis counts from 0
        return metrics["throughput/samples_per_second"]


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all its work."""
    torch.get_device_module(device).synchronize()


@contextmanager
def timed(
    seconds: list[float], device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Append to a list the seconds that a block takes, including all work of the device."""
    wait_for(torch.device(device))
    begin = clock()
    yield
    wait_for(torch.device(device))
    seconds.append(clock() - begin)


def peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
