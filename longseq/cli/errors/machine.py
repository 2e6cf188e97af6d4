"""Errors that the machine causes (memory, loader workers, other processes), each as a message of one line."""

import errno
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities import rank_zero_only
from torch.distributed import is_torchelastic_launched

from longseq.cli.names import shown
from longseq.compat.lightning import end_with_dead_rank, leave_sigterm_to_us
from longseq.compat.torch import asked_of_memory, dead_worker, is_lost_connection, is_out_of_memory
from longseq.training.signals import ENDING, answer, stopped_line, watched

MEMORY, WORKER_OR_RANK = 6, 7  # exit codes
_is_ending = threading.Event()  # set when this process ends together with all others
LOST_RANK = "another rank has ended or cannot be reached; see its message, then --resume"


def fault_of_machine(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code of an error that the machine caused; None for any other error."""
    if is_out_of_memory(error):
        return f"{what_was_asked(error)}; {_LESS}", MEMORY
    if worker := dead_worker(error):
        pid, how = worker
        if how.endswith("Terminated"):  # whoever stops a training sends SIGTERM to the workers of any loader too
            return stopped_line(signal.SIGTERM), 128 + signal.SIGTERM
        return (
            f"data.num_workers: worker {pid} {how}; it may have run out of memory: lower data.num_workers or "
            "data.batch_size, or load in the trainer's own process with 0, then --resume",
            WORKER_OR_RANK,
        )
    if _is_one_of_many() and is_lost_connection(error):
        if rank_zero_only.rank == 0 and not _is_started_by_others():
            time.sleep(8)  # meanwhile Lightning's observer prints which rank died, and ends this process
        return LOST_RANK, WORKER_OR_RANK
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk: no space left; free some space, or write to another place", MEMORY
    if limit := _limit_reached(error):
        return limit, MEMORY
    return None


def _limit_reached(error: BaseException) -> str | None:
    """The message for an error that a limit of the shell (ulimit) caused; None for any other error. It is recognized by
    its text, because an error from a worker has lost its number."""
    if "Too many open files" in str(error) or "items of ancdata" in str(error):
        what = f"files: more are open than the {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} of ulimit -n"
        return f"{what}; raise it (ulimit -n 4096), or lower data.num_workers"
    if "File too large" in str(error):
        return "disk: a file would be larger than ulimit -f lets it be; raise it (ulimit -f unlimited)"
    return None


_LESS = (
    "halve data.batch_size (and --trainer.accumulate_grad_batches 2), lower model.encoder.attention.k, or use "
    "--trainer.precision bf16-mixed or --model.encoder.checkpointing true"
)


def what_was_asked(error: BaseException) -> str:
    """How much memory could not be allocated, taken from an out-of-memory error."""
    if isinstance(error, MemoryError) and str(error):  # longseq raised it before the allocation
        return f"memory: {error}"
    asked = asked_of_memory(error)
    return "memory: " + (f"{asked} more could not be allocated" if asked else "not enough")


class Terminated(KeyboardInterrupt):
    """A signal ended the process. It is a KeyboardInterrupt, so Lightning ends its other ranks and no code treats it as
    an error.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def signals_stop() -> Iterator[None]:
    """Make SIGTERM, Ctrl-C and a closed terminal raise Terminated. During training, Sentinel handles these signals
    instead, and saves a checkpoint first."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    received = 0
    _is_ending.clear()

    def stop(number: int, frame: Any) -> NoReturn:
        nonlocal received
        received = number
        answer()
        raise Terminated(number)

    leave_sigterm_to_us()
    previous = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in previous.items():
        # otherwise this would undo nohup, which ignores SIGHUP, and & in a script, which ignores SIGINT
        if number == signal.SIGTERM or handler != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        with watched():
            yield
        if received:  # Terminated was raised in a finalizer, where Python ignores it
            raise Terminated(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signal_behind(error: BaseException | None) -> int:
    """The signal that ended the command, even if another error followed it; 0 if there was no signal."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return error.number if isinstance(error, Terminated) else signal.SIGINT
        error = error.__context__
    return 0


def name_dead_ranks() -> None:
    """Make Lightning, which ends all ranks when one dies, print which rank died and exit with our code."""
    end_with_dead_rank(_is_ending.is_set, WORKER_OR_RANK)


def miss_no_rank() -> None:
    """Keep Lightning from reporting dead ranks while this process ends, because the other ranks may end too."""
    _is_ending.set()


def rank_zero_has_started_us() -> bool:
    """Whether Lightning on rank zero started this rank, instead of torchrun or SLURM."""
    return rank_zero_only.rank > 0 and not _is_started_by_others()


def _is_started_by_others() -> bool:
    """Whether torchrun or SLURM started the ranks, instead of Lightning."""
    return is_torchelastic_launched() or SLURMEnvironment.detect()


def rank_zero_goes_on(seconds: float = 8.0) -> bool:
    """Whether the parent process (rank zero or torchrun) still runs some seconds after this process failed. If all
    ranks get the same error, rank zero ends too, or torchrun ends them all."""
    parent, end = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != parent:
            return False
        time.sleep(0.1)
    return True


def end_rank(message: str) -> NoReturn:
    """Print the error of the only rank that failed, and exit so that rank zero notices and ends the other ranks."""
    print(shown(f"error: rank {rank_zero_only.rank}: {message}"), file=sys.stderr, flush=True)
    os._exit(WORKER_OR_RANK)


def replace_port_in_use() -> None:
    """Unset MASTER_PORT if this process starts the ranks and the port is in use, so that Lightning chooses another."""
    port = os.environ.get("MASTER_PORT", "")
    started_by_another = {"LOCAL_RANK", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"} & set(os.environ)
    if not port.isdecimal() or started_by_another:
        return
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError:
            print(f"MASTER_PORT: {port} is in use; Lightning chooses another port", file=sys.stderr)
            del os.environ["MASTER_PORT"]


def forget_workers() -> None:
    """Ignore that the remaining loader workers end: torch would raise an error for each of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def leave_group() -> None:
    """End the threads of the process group, which would otherwise abort this process when it exits."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _is_one_of_many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
