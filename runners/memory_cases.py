"""Training cases of the memory benchmark, and its result type."""

from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt

Adapter = Literal["compute", "nf4"]
LENGTH, ROWS = 256, 2
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    """One training: ranks, ZeRO stage, recomputation, optimiser and adapter."""

    name: str
    ranks: int = 1
    zero_stage: int = 0
    recomputation: str = "none"
    optimizer: str = "adamw"
    adapter: Adapter | None = None
    rank: int = 16  # of the adapter

    @property
    def is_whole(self) -> bool:
        """Return whether every rank holds the whole model and its states."""
        return self.zero_stage == 0

    @property
    def compute_dtype(self) -> str:
        """Return the compute dtype: bf16 with adapters, whose base has 16-bit or 4-bit weights."""
        return "bf16" if self.adapter else "fp32"

    @property
    def training(self) -> dict[str, Any]:
        """Return the fields of the job spec."""
        layout = {"data_parallel_size": self.ranks, "zero_stage": self.zero_stage}
        return {
            "sequence_length": LENGTH,
            "micro_batch_size": ROWS,
            "gradient_accumulation_steps": self.ranks,
            "max_steps": 100,
            "time_budget_seconds": None,
            "compute_dtype": self.compute_dtype,
            "activation_recomputation": self.recomputation,
            "optimizer": self.optimizer,
            "layout": layout if self.ranks > 1 else None,
        }


ZERO = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
CASES = (
    Case("AdamW"),
    Case("selective recomputation", recomputation="selective"),
    Case("full recomputation", recomputation="full"),
    Case("AdamW 8-bit", optimizer="adamw_8bit"),
    Case("LOMO", optimizer="lomo"),
    Case("LoRA", adapter="compute"),
    Case("QLoRA", adapter="nf4"),
    *(
        Case(f"{name} on {ranks} ranks", ranks=ranks, zero_stage=stage)
        for ranks in (2, 4)
        for stage, name in enumerate(ZERO)
    ),
)


class Held(BaseModel):
    """The fullest rank's bytes per planner term, and its process memory at start and peak.

    ``activations`` include communication buffers: everything that a step allocates except
    gradients.
    """

    TERMS: ClassVar = ("weights", "adapters", "gradients", "optimizer_states", "activations")
    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str
    weights: NonNegativeInt
    adapters: NonNegativeInt
    gradients: NonNegativeInt
    optimizer_states: NonNegativeInt
    activations: NonNegativeInt
    process_peak: NonNegativeInt
    process_start: NonNegativeInt
