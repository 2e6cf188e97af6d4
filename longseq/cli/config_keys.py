"""Iterate over a configuration. Each key is written as a user types it, without ``init_args``."""

from collections.abc import Iterator, Mapping
from typing import Any


def locate(config: Mapping[str, Any], name: str) -> str:
    """The full key of an argument, ``k`` -> ``model.encoder.attention.k``; the name itself if there is none."""
    keys = list(keys_of(config))
    groups = [f"{key.partition(f'.{name}.')[0]}.{name}" for key in keys if f".{name}." in key]
    return next((key for key in keys if key.rpartition(".")[2] == name), groups[0] if groups else name)


def parts_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each part of a configuration that names a class, with its key. An item of a list has the list's key."""
    if isinstance(config, Mapping):
        if "class_path" in config:
            yield prefix, config
        for name, value in config.items():
            yield from parts_of(value, prefix if name == "init_args" else f"{prefix}.{name}".lstrip("."))
    elif isinstance(config, list):
        for value in config:
            yield from parts_of(value, prefix)


def items_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each plain value of a configuration, with its key. An item of a list has the list's key."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from items_of(value, prefix if name == "init_args" else f"{prefix}.{name}".lstrip("."))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from items_of(value, prefix)
    else:
        yield prefix, config


def keys_of(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys of a nested configuration."""
    for name, value in config.items():
        key = prefix if name == "init_args" else f"{prefix}.{name}".lstrip(".")
        if isinstance(value, Mapping):
            yield from keys_of(value, key)
        else:
            yield key
