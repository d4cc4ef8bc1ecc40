"""Reading checkpoints: files, tensors, names and the config."""
