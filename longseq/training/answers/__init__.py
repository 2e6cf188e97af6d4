"""What a trained model answers: predictions, events, and what decided."""
