"""A plan as the arguments of another tool: one format per file, all of them pure."""
