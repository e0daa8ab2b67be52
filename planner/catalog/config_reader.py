"""One ``config.json`` behind the common names, whatever its family calls them."""

from typing import Any

from planner.errors import BadConfigError

# Other names of a field, in the order in which they are looked for.
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


def _same_everywhere(value: Any) -> Any:  # noqa: ANN401 - a JSON value may be of any type
    """Return the one value of a list that repeats it for each layer, else the value itself."""
    is_list = isinstance(value, list) and bool(value)
    return value[0] if is_list and all(entry == value[0] for entry in value) else value


class ConfigReader:
    """A config with the family's own spelling of the common names."""

    def __init__(self, config: dict[str, Any]) -> None:
        text = config.get("text_config")
        self.outer = config
        self.config: dict[str, Any] = {**config, **(text if isinstance(text, dict) else {})}
        self.names: dict[str, str] = {}
        self.model_type = self._model_type()

    def _model_type(self) -> str:
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise BadConfigError(
                "config.json has no model_type: give the file as Hugging Face writes it, "
                "or the explicit fields of a ModelSpec",
                "model.model_type",
            )
        return model_type

    def spelling(self, name: str) -> str:
        """Return what the family calls a field, for messages."""
        return self.names.get(name, name)

    def get(self, name: str) -> Any:  # noqa: ANN401 - a JSON value may be of any type
        """Return a field by its common name, or nothing when the config leaves it out."""
        spellings = (self.spelling(name), name, *SPELLINGS.get(name, ()))
        return next((self.config[key] for key in spellings if key in self.config), None)

    def has(self, name: str) -> bool:
        """Return whether the config gives a field any value but null, zero or empty."""
        return bool(self.get(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number, or the default where the config leaves it out.

        Raises:
            BadConfigError: it is missing or out of range; the message has the config's own name.
        """
        value = _same_everywhere(self.get(name))
        if value is None:
            value = default
        own = self.spelling(name)
        if value is None:
            raise BadConfigError(
                f"config.json of model_type {self.model_type} lacks {own}", f"model.{own}"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadConfigError(
                f"{own} is {value!r}: it must be a whole number of at least 0", f"model.{own}"
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean, or the family's default when the config leaves it out."""
        value = self.get(name)
        return default if value is None else bool(value)

    def listed(self, name: str) -> tuple[Any, ...]:
        """Return a list with one entry a layer, cut to the model's layers; empty when absent.

        Entries past the last layer describe layers for multi-token prediction.

        Raises:
            BadConfigError: it names fewer layers than the model has.
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
