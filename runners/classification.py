"""What a classification is made of, for planner's pages and programs alike: shapes and classes."""

from collections.abc import Mapping

ENCODERS = ("distilbert",)  # architectures that a classification head is trained on
# The classes of the text that every host has: which package of Python's library a passage is of.
PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
MAX_CLASSES = 1000
# DistilBERT's shape at a size that two ranks of a CPU train in minutes. Without dropout, as
# everywhere in this trainer: a step then is the same on any number of ranks.
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
