"""The command line: ``longseq fit | test | predict | ...``, or ``python train.py ...`` in a clone."""

from longseq.cli.before_torch import main

__all__ = ["main"]
