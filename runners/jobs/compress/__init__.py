"""Make a model smaller: ``python -m runners.jobs.compress ATTEMPT_DIR``.

``grid`` and the modules of the methods are pure functions on one matrix; ``layers`` runs a
model one decoder layer at a time, ``engine`` applies a method to all of it, ``job`` judges it.
"""
