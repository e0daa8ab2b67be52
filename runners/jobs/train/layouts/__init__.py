"""The parallel layouts of a training, one module each, on a common device mesh."""
