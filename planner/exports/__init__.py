"""Exports of a plan as another tool's arguments: one pure format per file."""
