"""The process of a command: its threads, its signals, and the other ranks of a training."""
