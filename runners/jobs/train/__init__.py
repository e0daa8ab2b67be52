"""Train a model: in one process or many, full fine-tuning or LoRA."""
