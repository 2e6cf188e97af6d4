"""Run the blocks of an encoder as a pipeline of two processes (GPipe, gloo) and compare the gradients with one process:
pipeline_of_processes.py FOLDER. It prints each mechanism."""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from longseq import S4D, Blockwise, ImageEncoder, Linformer, Softmax, Verma
from longseq.encoders.forward_pass import encode_tokens, pooled

MECHANISMS = [Softmax(), Linformer(4), Verma(), Blockwise(), S4D()]
MICROBATCHES, CLASSES = 4, 3


class First(nn.Module):
    """From images to the tokens that leave the first two blocks."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder)
        self.encoder.trunk.blocks, self.encoder.trunk.norm = self.encoder.trunk.blocks[:2], nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return encode_tokens(self.encoder.trunk, *self.encoder.prepared(images))[0]


class Last(nn.Module):
    """From tokens to the outputs of the head."""

    def __init__(self, encoder: ImageEncoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = copy.deepcopy(encoder), copy.deepcopy(head)
        for depth in range(2):
            self.encoder.trunk.blocks[depth] = nn.Identity()  # the others keep their names

    def forward(self, tokens: Tensor) -> Tensor:
        trunk = self.encoder.trunk
        for block in trunk.blocks:
            tokens = block(tokens)
        return self.head(pooled(trunk, trunk.norm(tokens), None))


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for mechanism in MECHANISMS:
        torch.manual_seed(0)
        encoder = ImageEncoder((1, 8, 8), mechanism, dim=16, depth=4, heads=4).double()
        head: Any = nn.Linear(16, CLASSES).double()
        encoder.set_statistics(torch.full_like(encoder.mean, 100.0), torch.full_like(encoder.std, 50.0))
        images, labels = torch.randint(256, (8, 1, 8, 8), dtype=torch.uint8), torch.randint(CLASSES, (8,))
        parts = First(encoder), Last(encoder, head)
        loss = nn.functional.cross_entropy(head(encoder(images)), labels)
        loss.backward()
        part = parts[rank]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
        if rank == 0:
            schedule.step(images)
        else:
            losses: list[Tensor] = []
            schedule.step(target=labels, losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-10, atol=0)
        alone = dict(encoder.named_parameters(prefix="encoder")) | dict(head.named_parameters(prefix="head"))
        learning = {name: weight.grad for name, weight in part.named_parameters() if weight.grad is not None}
        for name, gradient in learning.items():
            torch.testing.assert_close(gradient, alone[name].grad, rtol=1e-8, atol=1e-12, msg=name)
        missing = [name for name, _ in part.named_parameters() if ".blocks." in name and name not in learning]
        assert learning and not missing, f"{mechanism}: process {rank} has no gradient of {missing}"
        if rank == 0:
            print(repr(mechanism), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1]
    Path(folder).mkdir(exist_ok=True)
    mp.start_processes(work, (folder,), nprocs=2, start_method="fork")
