"""What every data module promises."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from longseq.arguments import arguments_of
from longseq.contract.promise import promise, require
from longseq.files.description import describe
from longseq.training.data import lacking


def _set_up(data: Any) -> None:
    for stage in ("fit", "test"):
        data.setup(stage)


@promise("plain values describe it and make it again", "keep each argument of the constructor as an attribute")
def its_arguments_make_it_again(data: Any) -> None:
    arguments = arguments_of(data)
    described = describe(arguments)
    require(json.loads(json.dumps(described)) == described, "its description changes in a file")
    again = type(data)(**arguments)
    require(arguments_of(again) == arguments, "the module made of its arguments has others")
    for module in (data, again):
        _set_up(module)
    require(again.identity == data.identity, "the module made of its arguments has another identity")
    require(again.statistics() == data.statistics(), "the module made of its arguments has other statistics")


@promise("all that longseq asks for is there", "derive from ImageDataModule or AudioDataModule")
def nothing_is_lacking(data: Any) -> None:
    _set_up(data)
    require(not lacking(data), f"it lacks {', '.join(lacking(data))}")


@promise("shape and classes are known before setup", "say them in the constructor, or as properties")
def shape_and_classes_are_known_before_setup(data: Any) -> None:
    before = tuple(data.shape), list(data.class_names), data.num_classes
    require(data.num_classes == len(set(data.class_names)) >= 2, f"{data.num_classes} classes: {data.class_names}")
    _set_up(data)
    after = tuple(data.shape), list(data.class_names), data.num_classes
    require(before == after, f"they are {before} before and {after} after")


@promise("each split's batches have all its samples, as inputs of one kind with labels", "return LabelledTensors")
def batches_have_all_samples(data: Any) -> None:
    data.batch_size = 7
    _set_up(data)
    splits = data.splits()
    loaders = {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}
    for name, loader in loaders.items():
        inputs, labels = zip(*loader, strict=True)
        require(all(len(batch) == 7 for batch in labels[:-1]), f"{name}: a batch before the last is not of 7")
        for batch in inputs:
            if isinstance(batch, dict):
                (kind, values), longest = next(iter(batch.items())), int(batch["lengths"].max())
                axis = 1 if kind == "features" else -1
                require(values.dtype == torch.float32, f"{name}: {kind} are {values.dtype}")
                is_long = values.shape[axis] == longest <= data.shape[0 if axis == 1 else -1]
                require(is_long, f"{name}: {tuple(values.shape)}, {longest}")
                if kind == "features":
                    require(values.shape[2:] == tuple(data.shape[1:]), f"{name}: an input is {tuple(values.shape[1:])}")
                    continue
                channels, wanted = values.shape[1:-1].numel(), getattr(data, "num_channels", 1)
                require(channels == wanted, f"{name}: waveforms have {channels} channels, not {wanted}")
            else:
                require(tuple(batch.shape[1:]) == tuple(data.shape), f"{name}: an input is {tuple(batch.shape[1:])}")
                require(batch.dtype == inputs[0].dtype, f"{name}: inputs are {batch.dtype} and {inputs[0].dtype}")
        together = torch.cat(labels)
        require(together.dtype == torch.int64, f"{name}: labels are {together.dtype}")
        is_whole = torch.equal(together.sort(0)[0], splits[name].labels.sort(0)[0])
        require(is_whole, f"{name}: its batches have other labels than the split")
    trained = splits["train"].labels
    num_trained = int((trained.sum(0) > 0).sum()) if trained.ndim > 1 else len(trained.unique())
    require(num_trained == data.num_classes, f"{num_trained} of {data.num_classes} classes are in the training split")


@promise("splits.csv names each sample once", "give LabelledTensors the names of its samples")
def each_sample_is_written_down_once(data: Any) -> None:
    _set_up(data)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "splits.csv")
        data.save_splits(file)
        rows = file.read_text().splitlines()[1:]
    num_samples, num_unlike = sum(map(len, data.splits().values())), len(set(rows))
    require(
        num_unlike == len(rows) == num_samples,
        f"{num_samples} samples, {len(rows)} rows, {num_unlike} different ones",
    )


PROMISES = (
    shape_and_classes_are_known_before_setup, nothing_is_lacking, its_arguments_make_it_again, batches_have_all_samples,
    each_sample_is_written_down_once,
)  # fmt: skip
