"""Compression jobs: ``python -m runners.jobs.compress ATTEMPT_DIR``.

``grid`` and the method modules are pure functions on one matrix; ``layers`` runs a model one
decoder layer at a time, ``engine`` applies a method to all layers, ``job`` evaluates the result.
"""
