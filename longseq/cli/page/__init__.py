"""The page of predict --page: what was predicted, to look at, to correct, and to train from."""
