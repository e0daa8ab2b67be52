"""Read any Hugging Face ``config.json`` of a covered family into a ``ModelSpec``."""

from typing import Any

from pydantic import ValidationError

from planner.catalog.families import FAMILIES, NOT_COVERED, Family
from planner.errors import BadConfigError, NotCoveredError
from planner.specs.model import AttentionLayers, ModelSpec

DEFAULT_CONTEXT = 2048
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
MOE_REQUIRED = ("num_experts", "num_experts_per_tok")
OTHER_SPELLINGS = {"num_experts": "num_local_experts", "torch_dtype": "dtype"}
CONFIG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
QUANT_DTYPES = {"fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4"}


class ConfigReader:
    """A config with the family's own spelling of the common names."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.outer = config
        self.config: dict[str, Any] = {**config, **config.get("text_config", {})}
        self.model_type = self._model_type()
        self.family = _family_of(self.model_type)

    def _model_type(self) -> str:
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str):
            raise BadConfigError(
                "config.json has no model_type: give the file as Hugging Face writes it, "
                "or the explicit fields of a ModelSpec",
                "model.model_type",
            )
        return model_type

    def get(self, name: str) -> Any:  # noqa: ANN401 - a JSON value may be of any type
        """Return a field by its common name, or nothing when the config leaves it out."""
        own = self.family.names.get(name, name)
        spellings = (own, name, OTHER_SPELLINGS.get(name, name))
        return next((self.config[key] for key in spellings if key in self.config), None)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number, or raise with the config's own name of the field."""
        value = self.get(name)
        if value is None:
            value = default
        own = self.family.names.get(name, name)
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


def _family_of(model_type: str) -> Family:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in NOT_COVERED:
        raise NotCoveredError(
            f"model_type {model_type} is not covered yet: it has {NOT_COVERED[model_type]}",
            "model.model_type",
        )
    known = ", ".join(sorted(FAMILIES))
    raise BadConfigError(
        f"model_type {model_type!r} is not known: covered are {known}; a dense decoder of "
        "another name can be given by the explicit fields of a ModelSpec",
        "model.model_type",
    )


def model_from_config(config: dict[str, Any], model_id: str = "custom") -> ModelSpec:
    """Return the shape that a Hugging Face ``config.json`` describes.

    Multimodal configs are read through their ``text_config``: the language model alone.

    Raises:
        BadConfigError: a field is missing or out of range; the message names it.
        NotCoveredError: the family needs formulas that the planner does not have.
    """
    reader = ConfigReader(config)
    missing = [reader.family.names.get(n, n) for n in REQUIRED if reader.get(n) is None]
    if missing:
        raise BadConfigError(
            f"config.json of model_type {reader.model_type} lacks {', '.join(missing)}",
            f"model.{missing[0]}",
        )
    fields = {**_shape(reader), **_structure(reader), **_experts(reader), **_published(reader)}
    try:
        return ModelSpec(id=model_id, model_type=reader.model_type, **fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise BadConfigError(
            f"{name} is {first['input']!r}: {first['msg'].lower()}", f"model.{name}"
        ) from error


def _shape(reader: ConfigReader) -> dict[str, Any]:
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    multiple = reader.family.default_ffn_multiple
    ffn_default = hidden * multiple if multiple else None
    if reader.model_type == "mpt":
        ffn_default = int(hidden * float(reader.config.get("expansion_ratio", 4)))
    gate_and_up = 2 if reader.family.fused_gate_width else 1
    if heads == 0:
        raise BadConfigError("num_attention_heads is 0: it must be at least 1", "model.config")
    return {
        "hidden_size": hidden,
        "intermediate_size": reader.integer("intermediate_size", ffn_default) // gate_and_up,
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(reader, heads),
        "head_dim": reader.integer("head_dim", hidden // heads),
        "vocab_size": reader.integer("vocab_size"),
        "max_position_embeddings": reader.integer("max_position_embeddings", DEFAULT_CONTEXT),
        "attention_layers": _attention_layers(reader),
    }


def _key_value_heads(reader: ConfigReader, heads: int) -> int:
    if reader.model_type != "falcon":
        return reader.integer("num_key_value_heads", heads)
    if reader.config.get("new_decoder_architecture"):
        return reader.integer("num_key_value_heads", heads)
    return 1 if reader.config.get("multi_query", True) else heads


def _attention_layers(reader: ConfigReader) -> tuple[AttentionLayers, ...]:
    window = reader.get("sliding_window")
    layers = reader.integer("num_hidden_layers")
    if not window or not reader.flag("use_sliding_window", default=True):
        return ()
    kinds = reader.get("layer_types")
    if kinds:
        sliding = sum(kind == "sliding_attention" for kind in kinds)
    elif reader.family.alternate_sliding:
        sliding = (layers + 1) // 2
    else:
        sliding = layers
    groups = []
    if sliding:
        groups.append(AttentionLayers(kind="sliding", count=sliding, window=int(window)))
    if layers > sliding:
        groups.append(AttentionLayers(count=layers - sliding))
    return tuple(groups)


def _structure(reader: ConfigReader) -> dict[str, Any]:
    family = reader.family
    bias = reader.flag("attention_bias", default=family.attention_bias)
    follows = reader.model_type in {"llama", "qwen3", "qwen3_moe"}
    norms = family.norms_per_layer
    if reader.model_type == "falcon" and not reader.config.get("new_decoder_architecture"):
        norms = 1 if reader.config.get("parallel_attn", True) else 2
    offset = family.learned_positions_offset
    context = reader.integer("max_position_embeddings", DEFAULT_CONTEXT)
    return {
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=family.tied_by_default),
        "gated_mlp": family.gated_mlp,
        "norm": family.norm,
        "norm_bias": family.norm_bias,
        "norms_per_layer": norms,
        "qk_norm": family.qk_norm,
        "attention_bias": bias,
        "attention_output_bias": bias if follows else family.attention_output_bias,
        "mlp_bias": reader.flag("mlp_bias", default=family.mlp_bias),
        "lm_head_bias": family.lm_head_bias,
        "learned_positions": 0 if offset is None else context + offset,
    }


def _experts(reader: ConfigReader) -> dict[str, Any]:
    if not reader.family.sparse:
        return {}
    for name in MOE_REQUIRED:
        reader.integer(name)
    layers, step = reader.integer("num_hidden_layers"), reader.config.get("decoder_sparse_step", 1)
    dense = set(reader.config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(layers) if (layer + 1) % int(step) != 0}
    return {
        "num_experts": reader.integer("num_experts"),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": reader.integer(
            "moe_intermediate_size", reader.integer("intermediate_size")
        ),
        "num_dense_layers": len(dense),
    }


def _published(reader: ConfigReader) -> dict[str, Any]:
    dtype = reader.get("torch_dtype") or reader.get("dtype")
    quant = reader.outer.get("quantization_config") or {}
    method = str(quant.get("quant_algo") or quant.get("quant_method") or "").lower()
    return {
        "weight_dtype": QUANT_DTYPES.get(method, CONFIG_DTYPES.get(str(dtype))),
        "quantization": method or None,
    }
