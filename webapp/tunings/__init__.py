"""Tunings: trials of the planner's best strategies of a plan on its host, and the best of them."""
