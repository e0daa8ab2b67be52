"""Other planners beside ours: their environments, one question to all, what each answers."""
