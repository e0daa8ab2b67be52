"""The queue of each pool: job order, device allocation, and reasons to wait."""
