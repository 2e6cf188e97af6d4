"""Measurements that end as a table and a picture: the commands benchmark, spectrum, approximation and sweep."""

from longseq.reports.benchmark import benchmark
from longseq.reports.spectrum import spectrum

COMMANDS = {"benchmark": benchmark, "spectrum": spectrum}

__all__ = ["COMMANDS", "benchmark", "spectrum"]
