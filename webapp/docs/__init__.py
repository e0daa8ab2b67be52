"""The documentation pages, rendered from templates/docs."""
