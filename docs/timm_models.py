"""Print the table of docs/pretrained.md: how many of timm's vision transformers can be plugged.

Run:  python docs/timm_models.py
"""

import timm
import torch
from timm.models import model_entrypoint

from longseq import Softmax, plug
from longseq.encoders.naflex import NaFlexVit, at_one_size

FILES = [
    "vision_transformer", "deit", "vision_transformer_hybrid", "vitamin", "eva", "naflexvit", "beit",
    "vision_transformer_relpos", "vision_transformer_sam", "cait", "xcit", "volo", "hiera", "convit", "tnt", "pit",
    "gemma4_vit", "qwen3_vit", "deepseek_vit",
]  # fmt: skip


def is_plugged(name: str) -> bool:
    """Whether a model can be plugged, itself or, a NaFlexViT, for one size of images."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
        if isinstance(model, NaFlexVit):
            height, width = model.embeds.patch_size
            model = at_one_size(model, (16 * height, 16 * width))
    try:
        plug(model, Softmax())
    except ValueError:
        return False
    return True


def main() -> None:
    print(f"timm {timm.__version__}\n\n| file of timm | models | plugged |\n|---|--:|--:|")
    totals = [0, 0]
    for of_file in FILES:
        names = [name for name in timm.list_models() if model_entrypoint(name).__module__.endswith(f".{of_file}")]
        counts = len(names), sum(map(is_plugged, names))
        print(f"| {of_file} | {counts[0]} | {counts[1]} |")
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    print(f"| all | {totals[0]} | {totals[1]} |")


if __name__ == "__main__":
    main()
