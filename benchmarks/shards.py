"""How long a million samples in shards take to list, and how much memory: python benchmarks/shards.py [SAMPLES].

It writes tar archives of 10,000 tiny PNG files with their labels into a temporary folder. Then a process lists all
samples for the first time, and another one reads the list that the first one stored. Memory is how much the process
holds at the end, and at its peak, above what it held after its imports. Seconds of one core are its processor time.
"""

import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from datamodules import ImageShards
from datamodules.archives.write_shards import write_tar
from longseq.training.throughput import timed

PER_SHARD = 10_000
CLASSES = 100


def write(folder: Path, samples: int) -> None:
    generator = np.random.default_rng(0)
    files = []
    for _ in range(CLASSES):
        file = io.BytesIO()
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    starts = range(0, samples, PER_SHARD)
    for number, first in enumerate(starts):
        split = {len(starts) - 2: "val", len(starts) - 1: "test"}.get(number, "train")
        members = (
            member
            for sample in range(first, min(first + PER_SHARD, samples))
            for member in (
                (f"class{sample % CLASSES:03}/{sample:09}.png", files[sample % CLASSES]),
                (f"class{sample % CLASSES:03}/{sample:09}.cls", str(sample % CLASSES).encode()),
            )
        )
        write_tar(folder / f"{split}-{number:06}.tar", members)


def measure(root: str) -> None:
    process = psutil.Process()
    before, peak, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    seconds: list[float] = []
    with timed(seconds), timed(seconds, clock=time.process_time):
        data = ImageShards(root, size=8, in_memory=False)
        samples = sum(len(shard.index.labels) for shard in data.listed.shards)
        labels = data._labels()
        name = data.name_of(samples - 1)
    at_work, whole = seconds
    done.set()
    watching.join()
    held, most = process.memory_info().rss - before, max(peak, before) - before
    assert len(labels) == samples
    print(f"{samples} samples, up to {name}: {whole:.1f} s ({at_work:.1f} s of one core), ", end="")
    print(f"{held / 1e6:.0f} MB held, {most / 1e6:.0f} MB at most")


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    if samples <= 2 * PER_SHARD:
        raise SystemExit(
            f"error: SAMPLES: must be more than {2 * PER_SHARD:,}, for a shard of each split; got {samples}"
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shards").mkdir()
        seconds: list[float] = []
        with timed(seconds):
            write(Path(folder) / "shards", samples)
        print(f"written in {seconds[0]:.0f} s", flush=True)
        environment = {**os.environ, "LONGSEQ_CACHE": str(Path(folder) / "cache")}
        for title in ("first start", "later starts"):
            print(f"{title}: ", end="", flush=True)
            command = [sys.executable, __file__, "--measure", str(Path(folder) / "shards")]
            subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        main()
