"""The command line: ``python train.py fit | validate | test | predict``."""

from longseq.cli.commands import main

__all__ = ["main"]
