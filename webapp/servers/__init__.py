"""Servers that somebody else started: watched through their own addresses, never changed."""
