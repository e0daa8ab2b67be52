"""Composes costs into work: a prefill, a decode step, a training step, a compression."""
