"""Search for the best strategy: enumerate, prune with reasons and numbers, rank, suggest."""
