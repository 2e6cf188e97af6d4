"""The command ``contract``: which promises a user's own class keeps."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from longseq.arguments import ArgumentError, SettingError
from longseq.attention import Mechanism, Projection
from longseq.contract import data, mechanism, projection, task
from longseq.contract.promise import BrokenPromise, Promise
from longseq.files.description import allow_classes, class_named, planned_arguments
from longseq.files.storage import CheckpointError
from longseq.tasks import Task

# What each kind of class promises. A class of several kinds is tested as the first of them.
KINDS: dict[type, Sequence[Promise]] = {
    Mechanism: mechanism.PROMISES,
    Projection: projection.PROMISES,
    Task: task.PROMISES,
    pl.LightningDataModule: data.PROMISES,
}


def contract(
    class_path: str,
    init_args: dict[str, Any] = {},  # noqa: B006  (jsonargparse shows it)
    allow_class: list[str] = [],  # noqa: B006
) -> None:
    """Test what longseq asks of a mechanism, a projection, a task or a data module, and print a line for each promise.

    A mechanism or a projection is tested on every object that its ``examples`` returns, a task on random outputs, and a
    data module on the data that it reads.

    Args:
        class_path: The class, such as pooled.Pooled.
        init_args: Arguments of its constructor, such as --init_args.root DIR; if given, only this object is tested.
        allow_class: Packages whose classes may be named, in addition to longseq's.

    Raises:
        ValueError: If the class is named without its package.
        SettingError: If the class does not exist, cannot be made, or breaks a promise.
    """
    allow_classes(allow_class)
    if "." not in class_path:
        what = f"must name the package too, got {class_path}"
        raise ArgumentError("class_path", f"{what}; give one such as longseq.attention.Linformer")
    try:
        kind: Any = class_named(class_path, tuple(KINDS), "class_path")
        plans = planned_arguments(kind, init_args, kind, "init_args")
    except CheckpointError as error:
        raise SettingError(str(error)) from error
    promises = next(promises for base, promises in KINDS.items() if issubclass(kind, base))
    num_broken = 0
    for promise in promises:
        failure = _broken(promise, _objects(kind, {name: plan() for name, plan in plans.items()}))
        print(f"fails: {promise.says}: {failure}" if failure else f"ok: {promise.says}", flush=True)
        num_broken += bool(failure)
    if num_broken:
        raise SettingError(f"{class_path}: breaks {num_broken} of {len(promises)} promises; fix what the lines name")
    print(f"{class_path} keeps all {len(promises)} promises")


def _objects(kind: Any, arguments: dict[str, Any]) -> Sequence[Any]:
    """New objects of a class: its examples, or one made of the arguments."""
    if not arguments and hasattr(kind, "examples"):
        if not (examples := kind.examples()):
            raise SettingError(f"{kind.__name__}: must have an example to test; return one from examples()")
        return examples
    try:
        return [kind(**arguments)]
    except (TypeError, ValueError) as error:
        if isinstance(argument := getattr(error, "argument", None), str):
            raise SettingError(f"init_args.{argument}: {getattr(error, 'what', error)}") from error
        raise SettingError(f"init_args: {error}; give --init_args.NAME VALUE for each argument") from error


def _broken(promise: Promise, objects: Sequence[Any]) -> str:
    """What is wrong with the first object that breaks a promise, and the remedy; "" if no object breaks it."""
    for subject in objects:
        try:
            promise(subject)
        except BrokenPromise as error:
            return f"{subject!r}: {error}" if len(objects) > 1 else str(error)
    return ""
