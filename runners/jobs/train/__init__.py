"""Train a model: on one process or many, every weight or an adapter."""
