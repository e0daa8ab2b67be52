"""Definitions of the figures of jobs, used by every page and export.

``registry`` lists them, ``takings`` defines how each kind of job measures them, ``table`` renders
the docs table. Values are computed in ``webapp/jobs/measured_figures.py``.
"""
