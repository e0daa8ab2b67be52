"""Trainings by Hugging Face's TRL, in its environment: data, events, checkpoints, results."""
