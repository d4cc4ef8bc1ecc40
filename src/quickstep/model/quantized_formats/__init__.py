"""Formats of checkpoints that are quantised already, each as a `storage.MatrixStorage`."""
