"""An OpenAI-compatible endpoint: continuous batching, paged KV cache, own HTTP server."""
