"""The JSON API for hosts and scripts."""
