"""Memory options of a training: recomputation, offload, optimiser."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from runners.jobspec.base import ComputeDtype, RunDocument

Recomputation = Literal["none", "selective", "full"]
Away = Literal["none", "cpu", "disk"]
OnSpike = Literal["stop", "skip"]
Optimizer = Literal[
    "adamw", "adamw_8bit", "adafactor", "lion", "lion_8bit", "sgd", "lomo", "adalomo", "qft"
]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
LengthSchedule = tuple[tuple[PositiveInt, Share], ...]
SHARE_ROUNDING = 1e-6
FUSED_OPTIMIZERS = frozenset(
    {"lomo", "adalomo", "qft"}
)  # they update weights within the backward pass
# Default learning rates, tuned on the demo model; AdamW's is also the spec's default.
USUAL_LEARNING_RATES: dict[str, float] = {
    "adamw": 3e-3,
    "adamw_8bit": 3e-3,
    "adafactor": 3e-2,
    "lion": 1e-3,
    "lion_8bit": 1e-3,
    "sgd": 0.2,
    "lomo": 0.2,
    "adalomo": 3e-2,
    "qft": 1e-3,
}


class TrainingMemory(RunDocument):
    """The fields of a training that trade memory for time.

    ``activation_recomputation``: "selective" keeps the outputs of matrix products and recomputes
    the rest of a layer, "full" keeps only a layer's input. ``activation_offload`` is where saved
    activations are stored, ``optimizer_offload`` where the optimiser's moments are.
    ``on_spike``: whether a step whose loss exceeds ``spike_loss_ratio`` times the recent median,
    and the loss of a uniform prediction, ends the training or is skipped.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 5; Chen et al. 2016,
    arXiv:1604.06174; Huang et al. 2020 (SwapAdvisor), ASPLOS.
    """

    activation_recomputation: Recomputation = "none"
    activation_offload: Away = "none"
    optimizer: Optimizer = "adamw"
    optimizer_offload: Away = "none"
    on_spike: OnSpike = "stop"
    spike_loss_ratio: float = Field(default=1.5, gt=1.0, le=100.0)

    @model_validator(mode="after")
    def _a_spike_can_be_skipped(self) -> Self:
        if self.on_spike == "skip" and self.optimizer in FUSED_OPTIMIZERS:
            msg = (
                f"on_spike skip: {self.optimizer} has changed the weights by the time that a "
                "step's loss is known; choose stop, which goes back to the last checkpoint"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _moments_can_wait_elsewhere(self) -> Self:
        if self.optimizer_offload != "none" and self.optimizer != "adamw":
            msg = (
                f"optimizer_offload {self.optimizer_offload} moves the two moments of adamw, and "
                f"the optimizer is {self.optimizer}; choose adamw, or optimizer_offload none"
            )
            raise ValueError(msg)
        return self

    def check_fused(self, count: int, dtype: ComputeDtype) -> None:
        """Reject gradient accumulation and scaling with fused optimisers, which keep no gradients.

        Raises:
            ValueError: the optimiser is fused, and a step has several micro-batches or is in fp16.
        """
        if self.optimizer not in FUSED_OPTIMIZERS:
            return
        if dtype == "fp16":
            msg = (
                f"{self.optimizer} uses each gradient as it comes, and compute_dtype fp16 has "
                "them scaled and checked together; choose bf16 or fp32"
            )
            raise ValueError(msg)
        if count > 1:
            msg = (
                f"{self.optimizer} updates each weight as its gradient comes, so a step is one "
                f"micro-batch, and gradient_accumulation_steps is {count}; make it 1 with a "
                "larger micro_batch_size, or choose adafactor or adamw_8bit"
            )
            raise ValueError(msg)


def check_lengths(
    schedule: LengthSchedule, longest: int, tokens: int, max_steps: int | None
) -> None:
    """Check that lengths increase to the longest one and divide a micro-batch's tokens.

    Raises:
        ValueError: a stage is invalid; the text gives the remedy.
    """
    if max_steps is None:
        raise ValueError(
            "length_schedule gives shares of the steps, and a time budget alone has no number of "
            "them; give max_steps"
        )
    lengths = [length for length, _ in schedule]
    if lengths != sorted(set(lengths)) or lengths[-1:] != [longest]:
        raise ValueError(
            f"length_schedule goes {lengths}; each length must be above the one before, and the "
            f"last one sequence_length, {longest}"
        )
    if abs(sum(share for _, share in schedule) - 1.0) > SHARE_ROUNDING:
        raise ValueError("length_schedule: the shares of the tokens must add up to 1")
    for length in lengths:
        if tokens % length:
            raise ValueError(
                f"length_schedule has {length} tokens, of which a micro-batch of {tokens} holds "
                "no whole number; choose lengths that divide it"
            )
