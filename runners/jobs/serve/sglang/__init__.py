"""An endpoint whose answers SGLang writes: its own server as a child on a loopback port.

It runs in the environment ``sglang``. Never run by us on a GPU: its arguments are held to
its own parser, and the names of its figures to its source.
"""
