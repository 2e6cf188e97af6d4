"""Measure and train in separate processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from longseq.compat.torch import is_out_of_memory
from longseq.training.fitting import OutOfMemory


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments such as ``-m MODULE``. It finds the same packages as this process; files in the working
    folder do not hide them."""
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)


def result_of_python(*arguments: str) -> dict[str, Any] | None:
    """The JSON that a Python process prints on its last line, with ``print_result``; None if the process died, in most
    cases for lack of memory."""
    process = run_python(*arguments)
    if process.returncode < 0 or process.returncode == OutOfMemory.exit_code:
        return None
    if process.returncode:
        error = RuntimeError(f"a cell failed: {process.stderr.strip().splitlines()[-1]}")
        error.add_note(process.stderr)
        raise error
    return json.loads(process.stdout.strip().split("\n")[-1])


def print_result(compute: Callable[[], dict[str, Any]]) -> None:
    """Print a result as JSON for ``result_of_python``, or exit with the code that means a lack of memory."""
    try:
        print(json.dumps(compute()))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            sys.exit(OutOfMemory.exit_code)
        raise
