"""Run a ViT of every mechanism on two processes (gloo), compare gradients with one process, print the mechanism."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_vit import MECHANISMS, images, model
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for mechanism in MECHANISMS:
        alone, shared = model(mechanism).double().train(), model(mechanism).double().train()
        alone(images(4).double()).square().sum(1).mean().backward()
        # find_unused_parameters is off: DistributedDataParallel then fails if a parameter gets no gradient
        wrapped = DistributedDataParallel(shared)
        wrapped(images(4).double()[2 * rank : 2 * rank + 2]).square().sum(1).mean().backward()
        for (name, mine), theirs in zip(shared.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=f"{mechanism}: {name}")
        if rank == 0:
            print(repr(mechanism), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1]
    Path(folder).mkdir(exist_ok=True)
    mp.start_processes(work, (folder,), nprocs=2, start_method="fork")
