"""Counts the exact bytes of live tensors during a step, independent of the allocator.

Tracks every operator's outputs and each storage's release: unlike process memory, the figure
excludes malloc caches and libraries and is the same on any machine.
"""

# mypy: disable-error-code="no-untyped-call"
# torch leaves its dispatch modes and hooks without types.

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators create while it is active, but no earlier ones.

    ``now`` and ``peak`` are bytes. On a CPU the backward pass is counted too, since it runs in
    the calling thread.
    """

    def __init__(
        self, before: Iterable[torch.Tensor] = (), *, follows_resizing: bool = False
    ) -> None:
        """Exclude the tensors in ``before``.

        With ``follows_resizing`` storages are measured again after each operator, because gathered
        weights are resized in place.
        """
        super().__init__()
        self._follows_resizing = follows_resizing
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[object]] = {}
        self._sizes: dict[int, int] = {}
        self._known = {id(each.untyped_storage()) for each in before}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's protocol
        """Run the operator and count its outputs."""
        del types
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._note(each)
        if self._follows_resizing:
            self._measure_again()
        return made

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting a live tensor."""
        key = id(tensor.untyped_storage())
        if key in self._alive:
            self._forget(key)
            self._known.add(key)

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or key in self._alive:
            return
        self._sizes[key] = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _gone: self._forget(key))
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)

    def _measure_again(self) -> None:
        for key, alive in list(self._alive.items()):
            storage = alive()
            if isinstance(storage, torch.UntypedStorage):
                self._sizes[key] = storage.nbytes()
        self.now = sum(self._sizes.values())
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]


@contextlib.contextmanager
def activations_counted(
    model: torch.nn.Module, *, follows_resizing: bool = False
) -> Iterator[LiveBytes]:
    """Count the tensors of a forward and backward pass, without weights and gradients."""
    gradients = (each.grad for each in model.parameters() if each.grad is not None)
    excluded = itertools.chain(model.parameters(), model.buffers(), gradients)

    def arrived(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            live.leave_out(parameter.grad)

    with LiveBytes(excluded, follows_resizing=follows_resizing) as live:
        hooks = [
            each.register_post_accumulate_grad_hook(arrived)
            for each in model.parameters()
            if each.requires_grad
        ]
        try:
            yield live
        finally:
            for hook in hooks:
                hook.remove()
