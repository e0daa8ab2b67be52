"""What stands in vLLM's place where there is no GPU to run it."""
