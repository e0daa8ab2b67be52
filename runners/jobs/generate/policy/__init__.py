"""Offload policies (FlexGen): weights, cache and activations on device, host and disk."""
