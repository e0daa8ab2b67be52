"""Saved plans and their wizard drafts."""
