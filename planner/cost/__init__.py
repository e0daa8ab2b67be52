"""What things cost: one resource per file, each formula once, for floats and numpy columns."""
