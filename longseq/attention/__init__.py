"""Attention at linear cost, for any timm vision transformer: tensors only, no training and no data."""

from longseq.attention.dynamic import Dynamic
from longseq.attention.from_inputs import start_from_inputs
from longseq.attention.grid import TokenGrid
from longseq.attention.linformer import Linformer
from longseq.attention.mechanism import Mechanism
from longseq.attention.mixer import TokenMixer
from longseq.attention.no_attention import NoAttention
from longseq.attention.others.blockwise import Blockwise
from longseq.attention.others.linear_transformer import LinearTransformer
from longseq.attention.others.longconv import LongConv
from longseq.attention.others.longformer import Longformer
from longseq.attention.others.lru import LRU
from longseq.attention.others.lstm import LSTM
from longseq.attention.others.mamba import Mamba
from longseq.attention.others.mamba2 import Mamba2
from longseq.attention.others.nystromformer import Nystromformer
from longseq.attention.others.performer import Performer
from longseq.attention.others.reformer import Reformer
from longseq.attention.others.s4 import S4
from longseq.attention.others.s4d import S4D
from longseq.attention.others.sparse_transformer import SparseTransformer
from longseq.attention.others.transformer_ls import TransformerLS
from longseq.attention.plug import carry, plug
from longseq.attention.projection import Gaussian, Linear, Projection
from longseq.attention.separable import Separable
from longseq.attention.softmax import Softmax
from longseq.attention.static_mixing import StaticMixing
from longseq.attention.verma import EfficientAttention, Verma
from longseq.attention.window import Conv, Max, Mean

__all__ = [
    "LRU",
    "LSTM",
    "S4",
    "S4D",
    "Blockwise",
    "Conv",
    "Dynamic",
    "EfficientAttention",
    "Gaussian",
    "Linear",
    "LinearTransformer",
    "Linformer",
    "LongConv",
    "Longformer",
    "Mamba",
    "Mamba2",
    "Max",
    "Mean",
    "Mechanism",
    "NoAttention",
    "Nystromformer",
    "Performer",
    "Projection",
    "Reformer",
    "Separable",
    "Softmax",
    "SparseTransformer",
    "StaticMixing",
    "TokenGrid",
    "TokenMixer",
    "TransformerLS",
    "Verma",
    "carry",
    "plug",
    "start_from_inputs",
]
