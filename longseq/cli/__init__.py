"""The command line: ``python train.py fit | validate | test | predict``."""

from longseq.cli.entry import main

__all__ = ["main"]
