"""Measuring and training in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from longseq.compat.torch import is_out_of_memory
from longseq.training.fitting import OutOfMemory


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments such as ``-m MODULE``; it finds the packages that this process finds, and prefers none
    of the working folder to them."""
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)


def run_apart(*arguments: str) -> dict[str, Any] | None:
    """What a Python process prints as JSON on its last line, by ``print_apart``; None if it died, of too little memory
    in most cases."""
    done = run_python(*arguments)
    if done.returncode < 0 or done.returncode == OutOfMemory.exit_code:
        return None
    if done.returncode:
        error = RuntimeError(f"a cell failed: {done.stderr.strip().splitlines()[-1]}")
        error.add_note(done.stderr)
        raise error
    return json.loads(done.stdout.strip().split("\n")[-1])


def print_apart(compute: Callable[[], dict[str, Any]]) -> None:
    """Print what is computed for ``run_apart``, or end with the code by which it knows that memory was too little."""
    try:
        print(json.dumps(compute()))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            sys.exit(OutOfMemory.exit_code)
        raise
