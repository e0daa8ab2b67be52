"""Template tags of the host pages and of pages that name hosts."""
