"""The blocks of an encoder can be a pipeline of torch.distributed.pipelining, which longseq has no flag for."""

from pathlib import Path

import forked
from pipeline_of_processes import MECHANISMS


def test_two_processes_as_a_pipeline_have_the_loss_and_the_gradients_of_one(tmp_path: Path) -> None:
    done = forked.run(Path(__file__).with_name("pipeline_of_processes.py"), tmp_path, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == list(map(repr, MECHANISMS))
