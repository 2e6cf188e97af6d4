"""The command ``board``: shows runs in TensorBoard, on this machine only."""

import logging
import threading
from contextlib import suppress
from pathlib import Path

from tensorboard.program import TensorBoard, TensorBoardServerException

from longseq.arguments import ArgumentError


def board(logdir: str = "runs", port: int | None = None) -> None:
    """Show runs in TensorBoard until Ctrl-C. Only this machine can open the page.

    Args:
        logdir: The folder of all runs, of one experiment, or of one run.
        port: The port of the page; by default the first free port from 6006.

    Raises:
        ValueError: If there is no such folder, or the port is taken.
    """
    if not Path(logdir).is_dir():
        raise ArgumentError("logdir", f"{logdir} is not a folder; give the one that holds the runs")
    if port is not None and not 1 <= port < 2**16:
        raise ArgumentError("port", f"must be in 1..65535, got {port}; 6006 is usual")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise it prints a line for each request
    page = TensorBoard()
    page.configure(logdir=logdir, host="127.0.0.1", port=port)
    try:
        address = page.launch()
    except TensorBoardServerException as error:
        raise ArgumentError("port", f"{port} cannot be opened ({error.msg}); leave it out for a free one") from error
    print(f"{address}#custom_scalars", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
