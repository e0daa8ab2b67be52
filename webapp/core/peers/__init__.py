"""Comparison with other planners: their environments, the question, and their answers."""
