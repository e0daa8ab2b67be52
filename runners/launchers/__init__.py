"""Launchers of claimed attempts: local processes, or jobs of a cluster's scheduler."""
