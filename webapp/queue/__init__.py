"""The queue of each pool: who is next, who gets which devices, and why the others wait."""
