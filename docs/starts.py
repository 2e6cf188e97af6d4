"""Measure how E should start in a model that was trained with exact attention: python docs/starts.py RUN [--root DATA].

RUN is a run with Softmax. Its attention becomes Linformer's or Verma's, with an E that starts random, as means over
windows, or as singular vectors. The table says how far the logits move, and the accuracy before and after fine-tuning.
It also has Verma without E.
"""

import logging
import warnings
from argparse import ArgumentParser
from pathlib import Path
from statistics import mean
from typing import Any

import pytorch_lightning as pl
import torch

from longseq import Linear, Linformer, Mechanism, Verma, resize
from longseq.attention import start_from_inputs
from longseq.files.checkpoint import read_checkpoint
from longseq.files.description import build
from longseq.reports.plots import markdown, markdown_row
from longseq.training import Classifier


@torch.no_grad()
def logits(model: Classifier, data: Any) -> torch.Tensor:
    return torch.cat([model.eval()(inputs) for inputs, _ in data.test_dataloader()])


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", help="where the data is, if it has moved")
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    checkpoint = read_checkpoint(arguments.run / "best.ckpt")
    exact = Classifier.from_checkpoint(checkpoint, learning_rate=arguments.learning_rate)
    description = checkpoint["data"]
    if arguments.root is not None and "root" in description["init_args"]:
        description["init_args"]["root"] = arguments.root
    data = build(description, pl.LightningDataModule)
    data.prepare_data()
    data.setup()
    expected, labels = logits(exact, data), data.test_set.labels

    def accuracy(outputs: torch.Tensor) -> float:
        return (outputs.argmax(1) == labels).float().mean().item()

    print(f"Softmax: test accuracy {accuracy(expected):.3f}; k = {arguments.k} of {exact.encoder.num_tokens} tokens\n")
    after = f"accuracy after {arguments.epochs} epochs"
    print(markdown(["attention", "E starts", "logits move by", "accuracy at once", after], []), end="")
    attentions: list[tuple[str, Mechanism]] = [("no E", Verma())]
    for kind in (Linformer, Verma):
        for start in ("random", "mean", "singular"):
            attentions.append((start, kind(k=arguments.k, projection=Linear(start))))
    for start, attention in attentions:
        moves, before, tuned = [], [], []
        for seed in range(arguments.seeds):
            pl.seed_everything(seed, verbose=False)
            model = resize(exact, attention=attention)
            if start == "singular":
                inputs, _ = next(iter(data.train_dataloader()))
                start_from_inputs(model.encoder, lambda model=model, inputs=inputs: model.encoder(inputs))
            outputs = logits(model, data)
            moves.append(((outputs - expected).norm() / expected.norm()).item())
            before.append(accuracy(outputs))
            trainer = pl.Trainer(
                accelerator="cpu", max_epochs=arguments.epochs, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            )  # fmt: skip
            trainer.fit(model.train(), datamodule=data)
            tuned.append(accuracy(logits(model, data)))
        spread = max(tuned) - min(tuned)
        figures = f"{mean(moves):.2f}", f"{mean(before):.3f}", f"{mean(tuned):.3f} ± {spread / 2:.3f}"
        print(markdown_row([type(attention).__name__, start, *figures]), end="", flush=True)


if __name__ == "__main__":
    main()
