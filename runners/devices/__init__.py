"""Reads the GPUs of a host, vendor by vendor, through the vendors' own libraries."""
