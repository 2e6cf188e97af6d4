"""longseq: classifiers of images and sound as very long sequences, at linear cost."""

from longseq.attention import Linear, Linformer, Mechanism, Softmax, Verma, plug

__all__ = ["Linear", "Linformer", "Mechanism", "Softmax", "Verma", "plug"]
