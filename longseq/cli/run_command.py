"""Run a command, and turn its errors into one line and an exit code."""

import gc
import importlib
import logging
import os
import sys
import warnings

from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from longseq.arguments import ArgumentError
from longseq.cli.command_list import COMMANDS
from longseq.cli.errors.machine import (
    LOST_RANK,
    WORKER_OR_RANK,
    end_rank,
    fault_of_machine,
    forget_workers,
    leave_group,
    miss_no_rank,
    name_dead_ranks,
    rank_zero_goes_on,
    rank_zero_has_started_us,
    replace_port_in_use,
    signal_behind,
    signals_stop,
)
from longseq.cli.names import shown
from longseq.cli.process.spinning import give_way
from longseq.compat.lightning import count_epochs_from_one
from longseq.compat.torch import dead_worker, message_of_worker
from longseq.files.description import OURS
from longseq.training.memory import keep_freed_memory
from longseq.training.recovery import Stopped
from longseq.training.signals import stopped_line


def run(args: list[str], began: float) -> None:
    """Run the command that the first argument names. A user's mistake becomes one line and an exit code.

    Args:
        args: The command and its arguments.
        began: The start of the process, on the clock of time.monotonic.
    """
    _quieten()
    name_dead_ranks()
    replace_port_in_use()
    try:
        with signals_stop(), give_way():
            for package in OURS:  # so that --data MNIST resolves
                importlib.import_module(package)
            is_function = bool(COMMANDS[args[0]].package)
            module = importlib.import_module(f"longseq.cli.{'function_commands' if is_function else 'model_commands'}")
            gc.freeze()  # otherwise each collection takes half a second to scan the imported objects, which stay anyway
            gc.enable()
            if is_function:
                module.run_function(args[0], args[1:])
            else:
                keep_freed_memory()
                module.run(args, began)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python prints an error when it exits
        sys.exit(141)  # the exit code that a shell gives for SIGPIPE
    except BaseException as error:
        answer = _message_and_exit_code(error)
        if answer is None:
            raise
        message, exit_code = answer
        is_stopped = exit_code > 128
        if is_stopped:
            miss_no_rank()
        elif "--debug" in args:
            raise
        if rank_zero_only.rank == 0:
            print(shown(message if is_stopped else f"error: {message}"), file=sys.stderr)
        elif not isinstance(error, Stopped) and message != LOST_RANK and rank_zero_goes_on():
            end_rank(message)
        if exit_code == WORKER_OR_RANK or dead_worker(error):
            forget_workers()
        if exit_code != WORKER_OR_RANK:
            leave_group()
        # A rank that fails together with rank zero exits with 0: otherwise Lightning would kill rank zero. A rank of
        # torchrun or SLURM does not, because they would take 0 for success and not start the job again.
        sys.exit(0 if rank_zero_has_started_us() else exit_code)


def _message_and_exit_code(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code for an error that a user can fix, or for a signal. None for --help, and for a bug of
    longseq, which keeps its traceback."""
    if isinstance(error, Stopped):
        return str(error), error.exit_code
    if received := signal_behind(error):
        return stopped_line(received), 128 + received
    if isinstance(error, SystemExit):
        return None
    if isinstance(error, MisconfigurationException):
        return f"trainer: {str(error).split(chr(10))[0].rstrip('.!')}; see --help", 2
    if isinstance(error, PermissionError):
        return f"{error.filename}: permission denied; make it readable, or choose another", 3
    if isinstance(error, ArgumentError):  # for example from a strategy
        return f"{error.argument}: {error.what}", 2
    exit_code = getattr(error, "exit_code", None)
    if exit_code is None:
        return fault_of_machine(error)
    return message_of_worker(error), exit_code


def _quieten() -> None:
    """Hide the messages that Lightning prints at every start and that need no action."""
    count_epochs_from_one()
    for package in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers",  # data in memory need no workers
        ".*callbacks used to create the checkpoint",  # a test needs no callbacks
        ".*exists and is not empty",  # the run's folder, which longseq made
        ".*LeafSpec",  # Lightning calls a deprecated function of torch
        ".*smaller than the logging interval",  # figures are logged at the end of an epoch anyway
        ".*Grad strides do not match bucket view",  # a convolution's gradient on several processes, which is correct
        ".*nn.functional.all_gather is deprecated",  # Lightning calls it
    ):
        warnings.filterwarnings("ignore", message)
