"""Saved plans and the wizard drafts they grow from."""
