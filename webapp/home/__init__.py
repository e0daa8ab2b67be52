"""The home page and the search."""
