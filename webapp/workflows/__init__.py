"""Workflows: jobs that follow one another, each with the model that the last one made."""
