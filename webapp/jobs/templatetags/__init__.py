"""Template tags of the job pages."""
