"""Scripts that measure what a plan claims: plain Python, exported as text with the claim."""
