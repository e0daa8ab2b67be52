"""Limits of a setup: longest context, most users, largest model, fewest devices."""
