"""Tests on one host everything that its jobs use: ``slipway-host prove``."""
