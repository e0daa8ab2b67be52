"""KV caches of a batch: plain, fp8, or packed to 4 or 2 bits.

fp8 is transformers' own quantised cache. 4 and 2 bits are implemented here: integers with one
scale and one offset per token and head, packed into bytes; the only library for it depends on a
package whose module name collides with the web server's.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel, QuantizedCache

from runners.jobs.memory import tensor_bytes
from runners.jobs.runtime import BadInputError
from runners.jobspec import KvCache

BITS = {"int4": 4, "int2": 2}
BYTE = 8


class Packed(NamedTuple):
    """Packed integers; a number represents ``offset + scale * number``."""

    numbers: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, bits: int) -> "Packed":
        """Quantise [..., size] values with one scale per vector of the last dimension."""
        low, high = values.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float16).tiny)
        numbers = ((values - low) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8)
        parts = numbers.unflatten(-1, (-1, BYTE // bits)) << _shifts(bits, values.device)
        return cls(parts.sum(dim=-1, dtype=torch.uint8), scale.half(), low.half())

    def unpacked(self, bits: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised values."""
        parts = self.numbers[..., None] >> _shifts(bits, self.numbers.device)
        numbers = (parts & (2**bits - 1)).flatten(-2).float()
        values: torch.Tensor = numbers * self.scale.float() + self.offset.float()
        return values.to(dtype)

    def with_more(self, newer: "Packed") -> "Packed":
        """Return these tokens followed by the newer ones."""
        pairs = zip(self, newer, strict=True)
        return Packed(*(torch.cat(pair, dim=-2) for pair in pairs))


class PackedLayer(DynamicLayer):
    """One layer's cache in few bits; each token is packed once, when it arrives."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.packed: tuple[Packed, ...] = ()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values and return all; the first call returns its input unquantised."""
        newer = tuple(Packed.of(each, self.bits) for each in (key_states, value_states))
        if not self.packed:
            self.is_initialized = True
            self.packed = newer
            return key_states, value_states
        pairs = zip(self.packed, newer, strict=True)
        self.packed = tuple(older.with_more(new) for older, new in pairs)
        keys, values = (each.unpacked(self.bits, key_states.dtype) for each in self.packed)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return int(self.packed[0].numbers.shape[-2]) if self.packed else 0


def check_cache(kind: KvCache, model: PreTrainedModel) -> None:
    """Check that the model supports this cache.

    Raises:
        BadInputError: it does not; the message names an alternative.
    """
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if kind != "plain" and layers != {DynamicLayer}:
        names = ", ".join(sorted(each.__name__ for each in layers))
        msg = f"a cache in {kind} needs full attention in every layer, here is {names}"
        raise BadInputError(f"{msg}; choose the plain cache")


def new_cache(kind: KvCache, model: PreTrainedModel) -> Cache:
    """Return an empty cache."""
    if kind == "plain":
        return DynamicCache(config=model.config)
    if kind == "fp8":
        return QuantizedCache("fp8", model.config)
    count = model.config.get_text_config().num_hidden_layers
    return Cache(layers=[PackedLayer(BITS[kind]) for _ in range(count)])


def cache_size(cache: Cache) -> int:
    """Return the bytes of a cache, including packed numbers and scales."""
    return sum(tensor_bytes(each) for layer in cache.layers for each in _tensors(vars(layer)))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, BYTE, bits, dtype=torch.uint8, device=device)
