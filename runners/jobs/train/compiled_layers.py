"""A model's layers compiled with torch.compile, so that pointwise operations are fused.

All layers are alike, so one compilation serves them all. The first steps run uncompiled as the
baseline of the speedup. Validation runs uncompiled too: its shapes would be compiled again.

Source: Wang et al. 2021 (LightSeq2), arXiv:2110.05722; Ansel et al. 2024 (PyTorch 2), ASPLOS.
"""

# mypy: disable-error-code="no-untyped-call"
# torch leaves its modules' ``compile`` untyped.

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from runners.jobs.compiler import check_compiler
from runners.jobs.runtime import BadInputError

PLAIN_STEPS = 4  # the first two allocate, the last two are the baseline
SETTLED = 2  # steps until the step time is steady, compiled or not


class CompiledLayers:
    """The layers of one training's model; compiled from ``PLAIN_STEPS`` on."""

    def __init__(self, model: PreTrainedModel, scratch: Path) -> None:
        """Find the layers.

        Raises:
            BadInputError: the host has no compiler, or the model no known layers.
        """
        check_compiler(scratch, "compiled")
        layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        self._layers: Sequence[Any] = layers  # torch types what is compiled as a tensor too
        if not layers:
            msg = f"compiled: {type(model).__name__} has no layers to compile; leave it out"
            raise BadInputError(msg)

    def begin(self) -> None:
        """Compile the layers at their next call."""
        for each in self._layers:
            each.compile(dynamic=False)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run the layers uncompiled within the block."""
        compiled = [each._compiled_call_impl for each in self._layers]  # noqa: SLF001 - no public API
        self.end()
        yield
        for each, call in zip(self._layers, compiled, strict=True):
            each._compiled_call_impl = call  # noqa: SLF001 - as above

    def end(self) -> None:
        """Run the layers uncompiled from now on."""
        for each in self._layers:
            each._compiled_call_impl = None  # noqa: SLF001 - as above

    def note(self, step_seconds: Sequence[float]) -> str:
        """Return a note on the compile time and the speedup."""
        plain, after = step_seconds[SETTLED:PLAIN_STEPS], step_seconds[PLAIN_STEPS + SETTLED :]
        text = f"{len(self._layers)} layers by torch.compile from step {PLAIN_STEPS + 1} on"
        if not plain or not after:
            return f"{text}; too few steps to say what it brought"
        before, now = statistics.median(plain), statistics.median(after)
        return (
            f"{text}, which took {step_seconds[PLAIN_STEPS]:.1f} s: a step of {before:.3f} s as "
            f"it was takes {now:.3f} s, {before / now:.2f} times as fast"
        )
