"""What an operator runs: commands, periodic duties, pruning, and the staff site."""
