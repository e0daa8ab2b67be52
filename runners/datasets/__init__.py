"""Training data files: record formats and validation."""
