"""Measurements that end as a table and a picture, each a command and a module of its name."""

REPORTS = ("benchmark", "spectrum", "approximation", "sweep")
