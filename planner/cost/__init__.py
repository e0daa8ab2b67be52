"""Cost formulas, one resource per module, for floats and numpy columns."""
