"""The processes that load batches: signals for a whole training are not theirs to answer."""

import os
import signal
import threading

from lightning_fabric.utilities.seed import pl_worker_init_function


def begin_worker(number: int) -> None:
    """Prepare a process that loads: the ``worker_init_fn`` of a DataLoader.

    timeout, scancel, systemd and Ctrl-C send their signals to the workers too. If these died of one, the trainer could
    not finish the step that it saves. A worker ends when the trainer asks it to, also by SIGTERM, and within some
    seconds after the trainer has ended.
    """
    if os.environ.get("PL_SEED_WORKERS") == "1":  # Lightning seeds only workers that have no function of their own
        pl_worker_init_function(number)
    for interrupt in (signal.SIGINT, signal.SIGHUP):
        signal.signal(interrupt, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # torch's handler would end the worker
    threading.Thread(target=_end_when_asked, args=(os.getppid(),), daemon=True).start()


def _end_when_asked(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer and os.getppid() == trainer:
        pass
    os._exit(0)
