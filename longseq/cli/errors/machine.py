"""Faults of the machine (memory, loader workers, other processes), each told in one line."""

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
from longseq.training.signals import ENDING, answer, watched

MEMORY, WORKER_OR_RANK = 6, 7  # exit codes
_is_ending = threading.Event()  # set when this process ends together with all others
LOST_RANK = "another rank has ended or cannot be reached; see its message, then --resume"


def fault_of_machine(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code of an error that the machine caused; None for any other."""
    if is_out_of_memory(error):
        return f"{what_was_asked(error)}; {_LESS}", MEMORY
    if worker := dead_worker(error):
        pid, how = worker
        return (
            f"data.num_workers: worker {pid} {how}; it may have run out of memory: lower data.num_workers or "
            "data.batch_size, or load in the trainer's own process with 0, then --resume",
            WORKER_OR_RANK,
        )
    if _is_one_of_many() and is_lost_connection(error):
        if rank_zero_only.rank == 0 and not _is_started_by_others():
            time.sleep(8)  # meanwhile Lightning's observer prints which rank it is, and ends this process
        return LOST_RANK, WORKER_OR_RANK
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk: no room for what is written; make room, or write to another place", MEMORY
    if limit := _limit_reached(error):
        return limit, MEMORY
    return None


def _limit_reached(error: BaseException) -> str | None:
    """What to say of an error that a limit of the shell has caused (ulimit), in this process or in a worker, whose
    errors have no number left; None for any other."""
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
    """How much memory was missing, as an error for too little memory says it."""
    if isinstance(error, MemoryError) and str(error):  # from longseq, before it allocates
        return f"memory: {error}"
    asked = asked_of_memory(error)
    return "memory: " + (f"{asked} more could not be allocated" if asked else "not enough")


class Terminated(KeyboardInterrupt):
    """A signal ends a process as Ctrl-C does: Lightning then ends its other ranks, and no code treats it as an error.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def signals_stop() -> Iterator[None]:
    """Let SIGTERM, Ctrl-C and a closed terminal raise Terminated. During a training, Sentinel handles them and saves a
    checkpoint first."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers of signals
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
        if number == signal.SIGTERM or handler != signal.SIG_IGN:  # nohup ignores SIGHUP, and & in a script SIGINT
            signal.signal(number, stop)
    try:
        with watched():
            yield
        if received:  # Python ignores what is raised in a finalizer
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
    """When a rank dies, Lightning ends all ranks: let it print which rank died, and exit with a code of ours."""
    end_with_dead_rank(_is_ending.is_set, WORKER_OR_RANK)


def miss_no_rank() -> None:
    """Keep Lightning from reporting a dead rank: this process ends, and the other ranks may end too."""
    _is_ending.set()


def rank_zero_has_started_us() -> bool:
    """Whether Lightning has started this rank from rank zero, and not torchrun or SLURM."""
    return rank_zero_only.rank > 0 and not _is_started_by_others()


def _is_started_by_others() -> bool:
    """Whether torchrun or SLURM has started the ranks, and not Lightning."""
    return is_torchelastic_launched() or SLURMEnvironment.detect()


def rank_zero_goes_on(seconds: float = 8.0) -> bool:
    """Whether whoever started this process still runs some seconds after this process failed: rank zero, or torchrun.
    If all ranks meet the same error, rank zero ends too, or torchrun ends them all."""
    parent, end = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != parent:
            return False
        time.sleep(0.1)
    return True


def end_rank(message: str) -> NoReturn:
    """Print the error of a rank that fails alone, and exit so that rank zero notices it and ends the other ranks."""
    print(shown(f"error: rank {rank_zero_only.rank}: {message}"), file=sys.stderr, flush=True)
    os._exit(WORKER_OR_RANK)


def replace_port_in_use() -> None:
    """If this process starts the ranks and MASTER_PORT is in use, unset it, so that Lightning chooses a free port."""
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
    """Ignore the end of the remaining loader workers: torch would raise an error for each of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def leave_group() -> None:
    """End the threads of the process group: otherwise they would abort this process when it exits."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _is_one_of_many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
