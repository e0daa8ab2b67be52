"""Tamper-evident event history: hash chain, database triggers, and the audit page."""
