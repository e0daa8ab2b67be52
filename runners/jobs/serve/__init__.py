"""An OpenAI-compatible endpoint: continuous batching over a paged cache, behind our own door."""
