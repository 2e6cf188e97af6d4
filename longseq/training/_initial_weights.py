"""The start of a new training: the weights of a checkpoint, and the statistics of the training set."""

from typing import Any

from pytorch_lightning.utilities import rank_zero_warn

from longseq.attention import carry, start_from_inputs
from longseq.attention.plug import is_of_attention
from longseq.files.checkpoint import CheckpointError
from longseq.training.statistics import measure_inputs, training_inputs


def start_from_checkpoint(model: Any, path: str) -> bool:
    """Copy the fitting weights of a trained classifier, and print what changed.

    Returns:
        Whether any weight of the attention is new.

    Raises:
        CheckpointError: If a weight whose shape does not depend on the size of the inputs does not fit.
    """
    trained = type(model).load_from_checkpoint(path)
    try:
        fresh = carry(trained.encoder.trunk, model.encoder.trunk)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; build the encoder with the same arguments") from error
    messages = [f"started from {path}"]
    old, new = (classifier.encoder.trunk.patch_embed.grid_size for classifier in (trained, model))
    if old != new:
        messages.append(f"tokens {old[0]} x {old[1]} before, {new[0]} x {new[1]} now: position embeddings resampled")
        if len(fresh) == 0:
            messages[-1] += ", projections interpolated"
    if fresh:
        messages.append(f"new weights, because the checkpoint has none like them: {len(fresh)}")
    dropped = _names_outside_attention(trained) - _names_outside_attention(model)
    if dropped:
        what = "weights of the checkpoint that are left behind, because this model has none like them"
        messages.append(f"{what}: {len(dropped)}, such as {min(dropped)}")
    if trained.class_names == model.class_names and _shapes(trained.head) == _shapes(model.head):
        model.head.load_state_dict(trained.head.state_dict())
        if model.pooling is not None and type(model.pooling) is type(trained.pooling):
            model.pooling.load_state_dict(trained.pooling.state_dict())
    else:
        was, now = (type(classifier.task).__name__ for classifier in (trained, model))
        if was == now:
            was, now = f"{trained.num_classes} classes", str(model.num_classes)
        messages.append(f"the head gets new weights: {was} before, {now} now")
        if trained.num_classes == model.num_classes:
            pairs = zip(trained.class_names, model.class_names, strict=True)
            messages[-1] += next((f", such as {old} and {new}" for old, new in pairs if old != new), "")
    if model.trainer.is_global_zero:
        print("; ".join(messages))
    return bool(fresh)


def start_from_data(model: Any, fresh: bool) -> None:
    """Measure the training set's mean and deviation, and start projections from it if they ask for it.

    Args:
        model: The classifier, with a trainer.
        fresh: Whether projections are new.
    """
    datamodule = getattr(model.trainer, "datamodule", None)
    projection = getattr(model.encoder.attention, "projection", None)
    is_singular = fresh and getattr(projection, "start", None) == "singular"
    if datamodule is None:
        if is_singular:
            rank_zero_warn("no data module to start projections from: they stay random; call start_from_inputs")
        return  # the encoder measures the first training batch, unless it was measured before
    measure_inputs(model.encoder, datamodule)
    if is_singular:
        inputs = next(training_inputs(datamodule, model.encoder.mean.device))
        start_from_inputs(model.encoder, lambda: model.encoder(inputs))


def _names_outside_attention(model: Any) -> set[str]:
    """The names of the trunk's weights, except those of attention, which each attention layer copies itself."""
    return {name for name in model.encoder.trunk.state_dict() if not is_of_attention(name)}


def _shapes(module: Any) -> dict[str, Any]:
    return {name: weight.shape for name, weight in module.state_dict().items()}
