"""Encoders, demo model and demo classes of text classification, shared by web and jobs."""

from collections.abc import Mapping

ENCODERS = ("distilbert",)  # architectures with a trainable classification head
# Classes of the host's own text: the standard library package that a passage comes from.
PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
MAX_CLASSES = 1000
# DistilBERT at a size that two CPU ranks train in minutes. No dropout, as everywhere in this
# trainer: a step is then the same on any number of ranks.
DEMO_ENCODER: Mapping[str, object] = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForSequenceClassification"],
    "dim": 192,
    "hidden_dim": 768,
    "n_layers": 4,
    "n_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "num_labels": len(PACKAGES),
}
