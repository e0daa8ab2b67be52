"""The smallest model and the shortest jobs that tests ask for."""

from typing import Any

from runners.jobspec import DemoModel, TrainSpec

TINY = DemoModel(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=64,
)
TINY_CONFIG: dict[str, object] = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    **TINY.model_dump(exclude={"source"}),
}
SHORT = {"prompt_tokens": 16, "output_tokens": 2, "evaluation_tokens": 1024}


def tiny_training(**changes: Any) -> TrainSpec:
    """Return a training of seconds; ``changes`` replace fields."""
    fields = {
        "model": TINY,
        "sequence_length": 64,
        "micro_batch_size": 4,
        "max_steps": 60,
        "time_budget_seconds": None,
        "compute_dtype": "fp32",
        "learning_rate": 1e-2,
    }
    return TrainSpec(**{**fields, **changes})
