"""A trained model outside longseq: as ONNX, as a program of torch.export, and as a folder to share."""
