"""Training runs: their folders, how they start and resume, and the files that describe them."""
