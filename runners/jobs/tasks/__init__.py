"""Tasks of lm-evaluation-harness: read from files, made of held-out text, run, compared."""
