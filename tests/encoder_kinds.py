"""Every kind of encoder that longseq.encoders exports, for tests that go over all of them."""

import inspect
from typing import Any

import longseq.encoders
from longseq.encoders import Encoder

EXPORTED: list[Any] = [getattr(longseq.encoders, name) for name in longseq.encoders.__all__]
KINDS = [
    kind for kind in EXPORTED if inspect.isclass(kind) and issubclass(kind, Encoder) and not inspect.isabstract(kind)
]
