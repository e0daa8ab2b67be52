"""A model's layers as compiled kernels: what lies between two products runs as one.

Layers are alike, so that one compilation serves all. The first steps run as they are: what they
take is the measure of what compiling brings. What is judged in between runs as it is, too: other
shapes would be compiled anew.

Source: Wang et al. 2021 (LightSeq2), arXiv:2110.05722; Ansel et al. 2024 (PyTorch 2), ASPLOS.
"""

# mypy: disable-error-code="no-untyped-call"
# torch leaves its modules' ``compile`` without types.

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from runners.jobs.compiler import check_compiler
from runners.jobs.runtime import BadInputError

PLAIN_STEPS = 4  # of which the first two allocate, and the last two are the measure
SETTLED = 2  # steps after which a run is steady, plain or compiled


class CompiledLayers:
    """The layers of one training's model; compiled from a given step on."""

    def __init__(self, model: PreTrainedModel, scratch: Path) -> None:
        """Find the layers.

        Raises:
            BadInputError: the host has no compiler, or the model no layers that are known.
        """
        check_compiler(scratch, "compiled")
        found = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        self._layers: Sequence[Any] = found  # torch types what is compiled as a tensor too
        if not found:
            msg = f"compiled: {type(model).__name__} has no layers to compile; leave it out"
            raise BadInputError(msg)

    def begin(self) -> None:
        """Have the layers compiled when they run next."""
        for each in self._layers:
            each.compile(dynamic=False)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run the layers as they are within the block."""
        compiled = [each._compiled_call_impl for each in self._layers]  # noqa: SLF001 - no public way
        self.end()
        yield
        for each, call in zip(self._layers, compiled, strict=True):
            each._compiled_call_impl = call  # noqa: SLF001 - as above

    def end(self) -> None:
        """Run the layers as they are from now on."""
        for each in self._layers:
            each._compiled_call_impl = None  # noqa: SLF001 - as above

    def note(self, step_seconds: Sequence[float]) -> str:
        """Return in words what compiling took and brought."""
        plain, after = step_seconds[SETTLED:PLAIN_STEPS], step_seconds[PLAIN_STEPS + SETTLED :]
        said = f"{len(self._layers)} layers by torch.compile from step {PLAIN_STEPS + 1} on"
        if not plain or not after:
            return f"{said}; too few steps to say what it brought"
        before, now = statistics.median(plain), statistics.median(after)
        return (
            f"{said}, which took {step_seconds[PLAIN_STEPS]:.1f} s: a step of {before:.3f} s as "
            f"it was takes {now:.3f} s, {before / now:.2f} times as fast"
        )
