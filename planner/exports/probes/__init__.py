"""Measuring scripts for a plan's claims: plain Python, exported as text with the claim."""
