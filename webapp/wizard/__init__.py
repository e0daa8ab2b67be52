"""The plan wizard: steps, drafts, the live verdict."""
