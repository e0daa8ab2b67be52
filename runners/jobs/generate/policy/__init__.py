"""A generation whose weights, cache and activations lie where a plan's shares put them."""
