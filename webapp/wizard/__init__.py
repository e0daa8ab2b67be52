"""The plan wizard: steps, drafts and the live verdict."""
