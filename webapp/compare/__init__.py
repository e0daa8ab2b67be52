"""Comparison of jobs: settings, predictions and measurements."""
