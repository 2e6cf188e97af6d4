"""Attention at linear cost, for any timm vision transformer: tensors only, no training and no data."""

from longseq.attention.linformer import Linformer
from longseq.attention.mechanism import Mechanism, TokenGrid
from longseq.attention.plug import plug
from longseq.attention.projection import Linear, Projection
from longseq.attention.softmax import Softmax
from longseq.attention.verma import Verma

__all__ = ["Linear", "Linformer", "Mechanism", "Projection", "Softmax", "TokenGrid", "Verma", "plug"]
