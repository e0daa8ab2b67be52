"""Tasks of lm-evaluation-harness: read from files or built of held-out text, run, compared."""
