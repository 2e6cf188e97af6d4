"""Measurements that end as a table and a picture: the commands benchmark, spectrum, approximation and sweep."""

from longseq.reports.approximation import approximation
from longseq.reports.benchmark import benchmark
from longseq.reports.spectrum import spectrum
from longseq.reports.sweep import sweep

COMMANDS = {"benchmark": benchmark, "spectrum": spectrum, "approximation": approximation, "sweep": sweep}

__all__ = ["COMMANDS", "approximation", "benchmark", "spectrum", "sweep"]
