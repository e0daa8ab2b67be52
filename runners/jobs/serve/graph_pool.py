"""CUDA graphs of functions without arguments, in one memory pool.

The graphs never run at once, so that each may use the memory of the others' intermediate
tensors; what a function gives back, it writes to a tensor that was made outside of it.

Source: docs.pytorch.org, CUDA semantics, "CUDA Graphs".
"""

# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.

from collections.abc import Callable, Hashable

import torch

from runners.jobs.weights import first_line


class CaptureError(Exception):
    """A function could not be captured; the message is the first line of the cause."""


class GraphPool:
    """Captures functions on a GPU, and runs them from their graphs; a CPU calls them."""

    def __init__(self, device: torch.device) -> None:
        self._is_capturing = device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.bytes = 0  # what the graphs have added to the device's reserved memory

    def __len__(self) -> int:
        """Return the number of captured functions."""
        return len(self._graphs)

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Capture a function, unless its key is known.

        It runs once before, so its effects must not add up.

        Raises:
            CaptureError: memory does not suffice, or an operation cannot be captured.
        """
        if not self._is_capturing or key in self._graphs:
            return
        try:
            self._graphs[key] = self._captured(function)
        except RuntimeError as error:  # of memory, of the device, of a missing operation
            raise CaptureError(first_line(error)) from error

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run a function: from its graph, which is captured if it is not yet.

        Raises:
            CaptureError: memory does not suffice, or an operation cannot be captured.
        """
        if not self._is_capturing:
            function()
            return
        self.capture(key, function)
        self._graphs[key].replay()

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            function()  # libraries choose kernels and make workspaces, which a capture may not
        current.wait_stream(stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        pool = next((each.pool() for each in self._graphs.values()), None)
        cause: list[RuntimeError] = []  # the end of a failed capture raises another error
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                try:
                    function()
                except RuntimeError as error:
                    cause.append(error)
                    raise
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that fails at its end leaves its own
            raise cause[0] if cause else error from None
        self.bytes += torch.cuda.memory_reserved(self._device) - before
        return graph
