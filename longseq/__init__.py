"""longseq: classifiers of images and sound as very long sequences, at linear cost."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longseq.attention import (
        LRU,
        LSTM,
        S4D,
        Conv,
        Dynamic,
        EfficientAttention,
        Gaussian,
        Linear,
        LinearTransformer,
        Linformer,
        LongConv,
        Longformer,
        Mamba2,
        Max,
        Mean,
        Mechanism,
        Nystromformer,
        Performer,
        Projection,
        Reformer,
        Separable,
        Softmax,
        SparseTransformer,
        TransformerLS,
        Verma,
        plug,
    )
    from longseq.deploy.predictor import load
    from longseq.encoders import (
        ASTEncoder,
        ImageEncoder,
        SpecAugment,
        SpectrogramEncoder,
        TimmEncoder,
        WaveformEncoder,
        resize,
    )

__version__ = "0.1.0"

__all__ = [
    "LRU",
    "LSTM",
    "S4D",
    "ASTEncoder",
    "Conv",
    "Dynamic",
    "EfficientAttention",
    "Gaussian",
    "ImageEncoder",
    "Linear",
    "LinearTransformer",
    "Linformer",
    "LongConv",
    "Longformer",
    "Mamba2",
    "Max",
    "Mean",
    "Mechanism",
    "Nystromformer",
    "Performer",
    "Projection",
    "Reformer",
    "Separable",
    "Softmax",
    "SparseTransformer",
    "SpecAugment",
    "SpectrogramEncoder",
    "TimmEncoder",
    "TransformerLS",
    "Verma",
    "WaveformEncoder",
    "load",
    "plug",
    "resize",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``longseq --help`` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load":
        from longseq.deploy.predictor import load as value  # Lightning takes seconds to import
    else:
        from longseq import attention, encoders

        value = getattr(attention if hasattr(attention, name) else encoders, name)
    globals()[name] = value
    return value
