"""Every technique that the planner plans: where it applies, what it does, who published it."""
