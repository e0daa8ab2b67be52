"""The demo model of ``runners.jobspec`` as a Hugging Face config for the planner."""

from typing import Any

from runners.jobspec import DemoModel

DEMO_NAME = "Slipway demo"


def demo_config(model: DemoModel | None = None) -> dict[str, Any]:
    """Return the Hugging Face config of the demo model that a training job creates."""
    return {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        **(model or DemoModel()).model_dump(exclude={"source"}),
    }
