"""Access to a ``config.json`` by common field names, independent of its family's names."""

import math
from collections import ChainMap
from typing import Any

from planner.errors import BadConfigError

# Alternative names of a field, in order of lookup.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    ),
    "num_shared_experts": (
        "n_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    "shared_expert_intermediate_size": (
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "head_dim": ("attention_head_dim",),
    "torch_dtype": ("dtype",),
    "sliding_window": ("sliding_window_size", "swa_window"),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
    "expert_hidden_size": ("moe_latent_size", "routed_expert_hidden_size"),
    "hidden_size": ("n_embed", "n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("seq_length", "n_positions", "max_sequence_length"),
    "index_head_dim": ("sparse_index_dim",),
    "index_n_heads": ("sparse_num_index_heads",),
    "index_topk_blocks": ("sparse_topk_blocks",),
    "index_block_size": ("sparse_block_size",),
    "attention_output_bias": ("attention_out_bias",),
}
# Model types of architectures whose configs state another family's; Grok 2 states "git".
MODEL_TYPES = {"Grok1ForCausalLM": "grok-1", "Grok1ModelForCausalLM": "grok-1"}
# Objects of a composite config that describe its language model.
TEXT_PARTS = ("text_config", "llm_config", "language_config")
# Larger numbers are treated as errors.
LARGEST = 10**9
LARGEST_OF = {"num_hidden_layers": 10_000, "num_experts": 1_000_000}


def _same_everywhere(value: object) -> object:
    """Return the value of a list that repeats one value, otherwise the value itself."""
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        return value[0]
    return value


class Fields:
    """The fields of one object of a config; errors name the full path of a field."""

    def __init__(self, config: dict[str, Any], *, path: str = "model", title: str = "it") -> None:
        self.config = config
        self.path = path
        self.title = title
        self.names: dict[str, str] = {}

    def _spellings(self, name: str) -> tuple[str, ...]:
        return (self.names.get(name, name), name, *SPELLINGS.get(name, ()))

    def spelling(self, name: str) -> str:
        """Return the config's name of a field, or the family's name if it is absent."""
        present = (key for key in self._spellings(name) if key in self.config)
        return next(present, self.names.get(name, name))

    def refusal(self, name: str, value: object, must: str) -> BadConfigError:
        """Return the error for a field with an invalid value."""
        own = self.spelling(name)
        return BadConfigError(f"{own} is {value!r}: it must be {must}", f"{self.path}.{own}")

    def get(self, name: str) -> Any:  # noqa: ANN401 - a JSON value may be of any type
        """Return a field by its common name, or None if it is absent."""
        return self.config.get(self.spelling(name))

    def has(self, name: str) -> bool:
        """Return whether a field has a value other than null, zero or empty."""
        return bool(self.get(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number, or the default if it is absent.

        Raises:
            BadConfigError: it is missing or out of range; the message uses the config's own name.
        """
        value = _same_everywhere(self.get(name))
        if value is None:
            value = default
        if value is None:
            own = self.spelling(name)
            raise BadConfigError(f"{self.title} lacks {own}", f"{self.path}.{own}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(name, value, "a whole number of at least 0")
        largest = LARGEST_OF.get(name, LARGEST)
        if value > largest:
            raise self.refusal(name, value, f"at most {largest:,}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1, or the default if it is absent.

        Raises:
            BadConfigError: it is missing or out of range.
        """
        value = self.integer(name, default)
        if value == 0:
            raise self.refusal(name, value, "at least 1")
        return value

    def optional(self, name: str) -> int | None:
        """Return a whole number, or None if it is absent, 0 or false."""
        return None if self.get(name) is False else self.integer(name, 0) or None

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of at least 0, or the default if it is absent.

        Raises:
            BadConfigError: it is missing or not such a number.
        """
        value = self.get(name)
        if isinstance(value, float) and math.isfinite(value) and 0 <= value <= LARGEST:
            return value
        whole_default = None if default is None else int(default)
        return (
            default if default is not None and value is None else self.integer(name, whole_default)
        )

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean, or the family's default if it is absent.

        Raises:
            BadConfigError: it is not a boolean; any non-empty text would count as true.
        """
        value = self.get(name)
        if value is None:
            return default
        if value not in (True, False):
            raise self.refusal(name, value, "true or false")
        return bool(value)

    def inside(self, name: str) -> "Fields":
        """Return the fields of a nested object; empty if it is absent.

        Raises:
            BadConfigError: it is not an object.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, "an object")
        own = f"{self.path}.{self.spelling(name)}"
        return Fields(value or {}, path=own, title=self.spelling(name))

    def each(self, name: str) -> tuple["Fields", ...]:
        """Return the fields of each object in a list.

        Raises:
            BadConfigError: it is not a list of objects.
        """
        value, own = self.get(name), self.spelling(name)
        listed = [] if value is None else value
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise self.refusal(name, value, "a list of objects")
        return tuple(
            Fields(one, path=f"{self.path}.{own}", title=f"{own}[{place}]")
            for place, one in enumerate(listed)
        )

    def items(self, name: str) -> list[Any]:
        """Return a list; empty if it is absent.

        Raises:
            BadConfigError: it is not a list.
        """
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self.refusal(name, value, "a list")
        return list(value)


class ConfigReader(Fields):
    """A config with its family's names of the common fields."""

    def __init__(self, config: dict[str, Any]) -> None:
        if not isinstance(config, dict):
            raise BadConfigError(
                f"config.json is {type(config).__name__} {config!r:.60}: it must be an object, as "
                "Hugging Face writes it",
                "model",
            )
        thinker = config.get("thinker_config")
        # The objects that may describe encoders beside the language model.
        self.composites = tuple(part for part in (config, thinker) if isinstance(part, dict))
        nested = [part.get(name) for part in self.composites for name in TEXT_PARTS]
        texts = [text for text in nested if isinstance(text, dict)]
        super().__init__(dict(ChainMap(*texts[-1:], *reversed(self.composites))))
        self.is_nested = bool(texts)
        self.outer = config
        self.model_type = self._model_type()
        self.title = f"config.json of model_type {self.model_type}"

    def _model_type(self) -> str:
        architectures = self.config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        model_type = MODEL_TYPES.get(str(first)) or self.config.get("model_type")
        if not isinstance(model_type, str):
            raise BadConfigError(
                "config.json has no model_type: give the file as Hugging Face writes it, "
                "or the explicit fields of a ModelSpec",
                "model.model_type",
            )
        return model_type

    def listed(self, name: str) -> tuple[Any, ...]:
        """Return a list with one entry per layer, cut to the model's layers; empty if absent.

        Entries beyond the last layer describe layers for multi-token prediction.

        Raises:
            BadConfigError: it has fewer entries than the model has layers.
        """
        value = self.get(name)
        if not isinstance(value, list | tuple) or not value:
            return ()
        layers = self.integer("num_hidden_layers")
        if len(value) < layers:
            raise BadConfigError(
                f"{self.spelling(name)} has {len(value)} entries, but the model has {layers} "
                "layers: it must name each of them",
                f"model.{self.spelling(name)}",
            )
        return tuple(value[:layers])
