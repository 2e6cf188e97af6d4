"""Draw inputs and confusion matrices."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from longseq.training.classifier import Classifier


@torch.no_grad()
def draw_inputs(model: Classifier, inputs: Any, labels: Tensor) -> Figure:
    """Draw a batch as the model sees it, with class names above; in training mode the inputs are mixed and masked.

    Args:
        model: Its encoder has measured its inputs.
        inputs: As the data module yields them, on the model's device.
        labels: One for each input.
    """
    encoder = model.encoder
    targets = labels
    if model.training and model.mix is not None:
        inputs, targets = model.mix(inputs, model.task.targets(labels, model.num_classes).to(model.device))
    names = [model.task.names(target, model.class_names) for target in targets]
    pictures, rows = encoder.front_end(inputs), encoder.rows(inputs)
    if model.training:
        pictures = encoder.augment((pictures - encoder.mean) / encoder.std) * encoder.std + encoder.mean
    counts = [pictures.shape[2]] * len(names) if rows is None else rows.tolist()
    cut = [picture[:, :count] for picture, count in zip(pictures.float().cpu(), counts, strict=True)]
    return encoder.draw(cut, names)


def draw_confusions(matrix: Int[Tensor, "classes classes"], class_names: Sequence[str]) -> Figure:
    """Draw how often each true class (row) is predicted as each class (column): counts, coloured by share of the row.

    Colours grow with the square root of the share, so that one error in a hundred is visible.
    """
    num_classes = len(class_names)
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    side = min(3 + 0.35 * num_classes, 10)
    figure = Figure((side + 1, side), dpi=120, layout="constrained")
    axes = figure.add_subplot(
        xlabel="predicted class",
        ylabel="true class",
        title=f"{int(matrix.trace())} of {int(matrix.sum())} right ({matrix.trace() / matrix.sum():.1%})",
    )
    image = axes.imshow(shares.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    figure.colorbar(image, label="share of the true class", shrink=0.8)
    if num_classes <= 50:
        upright = max(map(len, class_names)) <= 3
        axes.set_xticks(range(num_classes), class_names, rotation=0 if upright else 90, parse_math=False)
        axes.set_yticks(range(num_classes), class_names, parse_math=False)
    if num_classes <= 20:
        for row, column in matrix.nonzero().tolist():
            colour = "white" if shares[row, column] > 0.4 else "black"
            of_text = {"ha": "center", "va": "center", "color": colour, "fontsize": 8}
            axes.text(column, row, str(int(matrix[row, column])), **of_text, in_layout=False)  # it takes no room
    return figure
