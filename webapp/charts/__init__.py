"""Plotly figures as plain dictionaries, built from estimates and metric points."""
