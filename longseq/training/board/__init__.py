"""What a training shows in TensorBoard."""
