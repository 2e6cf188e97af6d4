"""Files that hold models: checkpoints, their descriptions, and folders to share."""
