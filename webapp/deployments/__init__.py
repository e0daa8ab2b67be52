"""Deployments: models under a lasting name, their jobs, the keys of clients, and usage."""
