"""Load benchmark: starts an endpoint, sends concurrent requests and reports measurements."""
