"""Proves on one host that every path of the product is real: ``slipway-host prove``."""
