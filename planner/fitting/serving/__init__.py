"""The fit of serving factors: engines, pairs of model and chip, and their priors."""
