"""Replay of a queue: months of jobs on thousands of hosts, decided as the pool's queue decides."""
