"""A trained model outside of longseq: as ONNX, as a program of torch.export, and as a folder to share."""
