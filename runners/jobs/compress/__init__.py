"""Compression jobs: ``python -m runners.jobs.compress ATTEMPT_DIR``.

``quantization`` and ``pruning`` are functions on one matrix or layer; ``layer_methods`` and
``layer_training`` are the methods by name, ``layerwise`` applies one to all layers of a model,
``whole_model`` compresses a model in memory, ``compressed_store`` is what is stored, and ``job``
evaluates the result.
"""
