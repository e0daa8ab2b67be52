"""The catalog's models, and the reading of a Hugging Face ``config.json``."""

import json
import re
from collections import ChainMap
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from planner.catalog.families import FAMILIES, NESTED_DEFAULTS, NOT_COVERED, Family
from planner.catalog.format_names import (
    StatedFormat,
    left_alone,
    split_format,
    with_format,
)
from planner.catalog.gguf import MXFP4_EXPERTS
from planner.catalog.hybrid_layers import read_towers, unknown_encoders
from planner.catalog.layer_groups import (
    LARGEST,
    ConfigReader,
    Fields,
    layer_types,
    read_experts,
    read_layer_groups,
)
from planner.catalog.model_names import ModelEntry, entries, find, read_name, without_address
from planner.catalog.published_weights import read_published_weights
from planner.catalog.reading import data_text, data_toml, nearest_names
from planner.cost.weights import WIDE
from planner.specs.base import BadConfigError, NotCoveredError, PlannerError
from planner.specs.model import ModelSpec

__all__ = [
    "ModelEntry",
    "checkpoint_name",
    "get_model",
    "is_known_model",
    "list_models",
    "model_from_config",
    "stretched_context",
    "stretched_model",
]


# ---------------------------------------------------------------------------
# Read any Hugging Face ``config.json`` of a covered family into a ``ModelSpec``.
# ---------------------------------------------------------------------------


DEFAULT_CONTEXT = 2048
# Fields with a length in tokens; the smallest applies.
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Kinds of rotary scaling that do not extend max_position_embeddings.
NOT_EXTENDING = frozenset({"su", "longrope", "llama3", "mrope", "default"})
# An unknown family with all PLAIN_DECODER fields and no NOT_PLAIN field is read as a gated dense
# decoder.
PLAIN_DECODER = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "hidden_act",
)
NOT_PLAIN = (
    "num_experts",
    "kv_lora_rank",
    "layers_block_type",
    "is_encoder",
    "is_encoder_decoder",
    "type_vocab_size",
)
# Name parts of fields that no plain decoder has: states, convolutions and recurrences.
OTHER_LAYERS = ("mamba", "ssm", "state_size", "conv", "lru", "rwkv", "xlstm", "linear_attn")
UNKNOWN_FAMILY = Family(output_bias_follows=True)
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


FAMILY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


def _family_of(reader: ConfigReader) -> Family:
    """Return the structure of a config's family, or of a plain decoder for an unknown family.

    Raises:
        NotCoveredError: the planner lacks formulas for this known family.
        BadConfigError: an unknown family lacks the fields of a plain decoder.
    """
    model_type = reader.model_type
    for named in (str(reader.outer.get("model_type")), model_type):
        if named in NOT_COVERED:
            raise NotCoveredError(
                f"model_type {named} is not covered yet: it has {NOT_COVERED[named]}",
                "model.model_type",
            )
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type and not FAMILY_NAME.fullmatch(model_type):
        raise BadConfigError(
            f"model_type {model_type[:80]!r} is not the name of a model family, which has "
            "letters, digits and any of _ . -; give the name that config.json was published with",
            "model.model_type",
        )
    missing = [name for name in PLAIN_DECODER if reader.get(name) is None]
    other = [name for name in reader.config if any(part in name for part in OTHER_LAYERS)]
    if missing or other or any(reader.has(name) for name in NOT_PLAIN):
        nearest = ", ".join(nearest_names(model_type, FAMILIES)) or "none"
        raise BadConfigError(
            f"model_type {model_type[:80]!r} is not known; nearest of the {len(FAMILIES)} that "
            f"are: {nearest}; a dense decoder of another name needs at least "
            f"{', '.join(PLAIN_DECODER)}, or the explicit fields of a ModelSpec",
            "model.model_type",
        )
    return UNKNOWN_FAMILY


def model_from_config(config: dict[str, Any], model_id: str = "custom") -> ModelSpec:
    """Return the model shape that a Hugging Face ``config.json`` describes.

    Of a multimodal config the language model is read (``text_config``), and its encoders are
    counted.

    Raises:
        BadConfigError: a field is missing or out of range; the message names it.
        NotCoveredError: the family needs formulas that the planner does not have.
    """
    reader = ConfigReader(config)
    family = _family_of(reader)
    reader.names = family.names
    explicit = {
        name: value
        for name, value in reader.config.items()
        if name not in family.ignores and (value is not None or name not in family.defaults)
    }
    inner = [reader.inside(name).config for name in family.nested]
    defaults = family.defaults
    if reader.is_nested:
        defaults = {**NESTED_DEFAULTS.get(reader.model_type, {}), **defaults}
    reader.config = {**defaults, **dict(ChainMap(*inner)), **explicit}
    if family.derives is not None:
        reader.config |= family.derives(reader)
    if reader.get("num_hidden_layers") is None and reader.has("layers_block_type"):
        reader.config["num_hidden_layers"] = len(reader.items("layers_block_type"))
    missing = [reader.config_key(name) for name in REQUIRED if reader.get(name) is None]
    if missing:
        raise BadConfigError(
            f"config.json of model_type {reader.model_type} lacks {', '.join(missing)}",
            f"model.{missing[0]}",
        )
    for name in REQUIRED:
        reader.positive(name)
    try:
        towers = read_towers(reader)
        fields = {
            **_shape(reader, family),
            **_structure(reader, family),
            **read_experts(reader, family),
            **read_published_weights(reader),
            **towers,
            "note": _note(reader, family, towers["uncounted"]),
            **(family.extras(reader) if family.extras else {}),
        }
        if reader.model_type in MXFP4_EXPERTS and fields["weight_dtype"] == "mxfp4":
            fields["native_dtype"] = "mxfp4"
        return ModelSpec(id=model_id, model_type=reader.model_type, **fields)
    except ValidationError as error:
        raise _refusal(reader, error) from error


def _refusal(reader: ConfigReader, error: ValidationError) -> BadConfigError:
    """Return the first validation error as a config error, with the config's own names."""
    first = error.errors(include_url=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "value_error":
        name = reader.config_key(message.partition(" ")[0])
        return BadConfigError(message, f"model.{name}")
    name = ".".join([reader.config_key(str(part)) for part in first["loc"]])
    return BadConfigError(f"{name} is {first['input']!r}: {message.lower()}", f"model.{name}")


def _note(reader: ConfigReader, family: Family, uncounted: tuple[str, ...]) -> str | None:
    """Return what is assumed of a family, and the parts of its checkpoint without a count."""
    field, doubt = family.unconfirmed
    notes = [f"model_type {reader.model_type}: {doubt}"] if field and reader.has(field) else []
    if family is UNKNOWN_FAMILY:
        notes.append(
            f"model_type {reader.model_type} is not known: it is read as a dense decoder with "
            "gated feed-forward blocks, two norms a layer and no biases but those that its config "
            "names"
        )
    unknown = [name for name in unknown_encoders(reader) if name not in uncounted]
    if unknown:
        notes.append(f"{', '.join(unknown)} is counted as a plain vision transformer")
    if uncounted:
        notes.append(f"the weights of {', '.join(uncounted)} are not counted")
    return "; ".join(notes) or None


def _shape(reader: ConfigReader, family: Family) -> dict[str, Any]:
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    gate_and_up = 2 if family.fused_gate_width else 1
    if heads > hidden and not (reader.has("head_dim") or reader.has("kv_lora_rank")):
        raise reader.refusal("num_attention_heads", heads, f"at most hidden_size, {hidden}")
    groups = read_layer_groups(reader, family)
    return {
        "hidden_size": hidden,
        "intermediate_size": _intermediate_size(reader, family) // gate_and_up,
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(reader, heads),
        "head_dim": _head_dim(reader, hidden // heads),
        "vocab_size": reader.integer("vocab_size"),
        "max_position_embeddings": context_tokens(reader, family),
        "attention_layers": groups,
        "num_layers_without_feed_forward": _layers_without_feed_forward(reader),
    }


def context_tokens(reader: ConfigReader, family: Family) -> int:
    """Return the longest request in tokens that the engines derive from a config.

    YaRN extends ``original_max_position_embeddings`` by its factor, the linear and dynamic kinds
    extend the smallest length field; ``model_max_length`` replaces the length fields. A window
    does not limit the context, because engines slide it.

    Source: vLLM, ``ModelConfig._get_and_verify_max_len`` and ``derive_max_model_len_and_key``.
    SGLang's ``get_context_length`` ignores the factor if the original length is stated, so that it
    needs ``--context-length`` for some YaRN configs; transformers has no limit.
    """
    lengths = [reader.positive(name) for name in LENGTHS if reader.get(name) is not None]
    length = reader.optional("model_max_length") or min(lengths, default=DEFAULT_CONTEXT)
    scalings = () if family.states_extended_length else _rotary_scalings(reader)
    extended = max((_extended(length, scaling) for scaling in scalings), default=length)
    if extended > LARGEST:
        raise reader.refusal("max_position_embeddings", extended, f"at most {LARGEST:,}")
    return extended


def _rotary_scalings(reader: ConfigReader) -> tuple[Fields, ...]:
    """Return the scaling of rotary positions, or one per kind of layer (transformers 5)."""
    scaling = reader.inside("rope_parameters" if reader.has("rope_parameters") else "rope_scaling")
    nested = [name for name, value in scaling.config.items() if isinstance(value, dict)]
    if nested and len(nested) == len(scaling.config):
        return tuple(scaling.inside(name) for name in nested)
    return (scaling,) if scaling.config else ()


def stretched_context(length: int, scaling: dict[str, Any]) -> int:
    """Return a context of ``length`` tokens stretched by a ``rope_scaling`` of transformers.

    Raises:
        BadRequestError: a field of the scaling is no number.

    >>> stretched_context(40960, {"rope_type": "yarn", "factor": 4.0,
    ...                           "original_max_position_embeddings": 32768})
    131072
    """
    return _extended(length, Fields(scaling, path="rope_scaling", title="rope_scaling"))


def stretched_model(named: str | dict[str, Any], scaling: dict[str, Any]) -> ModelSpec:
    """Return a model of the catalog or of a config, its context stretched by a ``rope_scaling``.

    Raises:
        PlannerError: the model is unknown, or a field of the scaling is no number.
    """
    model = get_model(named) if isinstance(named, str) else model_from_config(named)
    tokens = stretched_context(model.max_position_embeddings, scaling)
    note = (
        f"rope_scaling {json.dumps(scaling)} stretches its context of "
        f"{model.max_position_embeddings:,} tokens to {tokens:,}: the engine has to be told"
    )
    return _noted(model.model_copy(update={"max_position_embeddings": tokens}), note)


def _extended(length: int, scaling: Fields) -> int:
    """Return a length extended by one rotary scaling."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind in NOT_EXTENDING or scaling.get("factor") is None:
        return length
    original = scaling.optional("original_max_position_embeddings") if kind == "yarn" else None
    return int((original or length) * scaling.number("factor"))


def _intermediate_size(reader: ConfigReader, family: Family) -> int:
    hidden, multiple = reader.integer("hidden_size"), family.default_ffn_multiple
    default = hidden * multiple if multiple else None
    if reader.model_type == "mpt":
        default = int(hidden * reader.number("expansion_ratio", 4))
    return reader.integer("intermediate_size", 0 if family.sparse and not default else default)


def _head_dim(reader: ConfigReader, default: int) -> int:
    """Return the width of a query head; for latent attention the sum of both parts."""
    if reader.has("kv_lora_rank"):
        return reader.integer("qk_nope_head_dim") + reader.integer("qk_rope_head_dim")
    return reader.positive("head_dim", default)


def _layers_without_feed_forward(reader: ConfigReader) -> int:
    """Return the number of pattern layers that only mix tokens."""
    named = layer_types(reader)
    alone = {"moe", "mlp"}
    return sum(name not in alone for name in named) if alone & set(named) else 0


def _key_value_heads(reader: ConfigReader, heads: int) -> int:
    if reader.model_type != "falcon" or reader.flag("new_decoder_architecture", default=False):
        return reader.positive("num_key_value_heads", heads)
    return 1 if reader.flag("multi_query", default=True) else heads


def _structure(reader: ConfigReader, family: Family) -> dict[str, Any]:
    bias = reader.flag("attention_bias", default=family.attention_bias)
    norms = family.norms_per_layer
    if reader.model_type == "falcon" and not reader.flag(
        "new_decoder_architecture", default=False
    ):
        norms = 1 if reader.flag("parallel_attn", default=True) else 2
    if reader.model_type == "stablelm" and reader.flag("use_parallel_residual", default=False):
        norms = 1
    offset = family.learned_positions_offset
    context = reader.positive("max_position_embeddings", DEFAULT_CONTEXT)
    switch = family.qk_norm_switch
    return {
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=family.tied_by_default),
        "gated_mlp": family.gated_mlp,
        "norm": family.norm,
        "norm_bias": family.norm_bias,
        "norms_per_layer": norms,
        "qk_norm": family.qk_norm if switch is None else reader.flag(switch, default=False),
        "qk_norm_width": family.qk_norm_width,
        "attention_bias": bias,
        "attention_output_bias": reader.flag(
            "attention_output_bias",
            default=bias if family.output_bias_follows else family.attention_output_bias,
        ),
        "mlp_bias": reader.flag("mlp_bias", default=family.mlp_bias),
        "lm_head_bias": reader.flag("lm_head_bias", default=family.lm_head_bias),
        "extra_parameters": family.extra_per_layer * reader.integer("num_hidden_layers")
        + family.extra_hidden_vectors * reader.integer("hidden_size"),
        "learned_positions": 0 if offset is None else context + offset,
    }


# ---------------------------------------------------------------------------
# The model catalog: published configs by Hugging Face id, case-insensitive.
#
# planner/catalog/model_names.py reads the names.
# ---------------------------------------------------------------------------


def list_models() -> tuple[ModelEntry, ...]:
    """Return every catalog entry, largest families first as in the data file."""
    return tuple(entries().values())


def is_known_model(model_id: str) -> bool:
    """Return whether the catalog has a name, without a search for the nearest ones.

    >>> is_known_model("NousResearch/Llama-2-7b-chat-hf"), is_known_model("my/model-9b")
    (True, False)
    """
    return find(model_id) is not None


def get_entry(model_id: str) -> ModelEntry:
    """Return the catalog's entry for an id or alias, or for a checkpoint of its model.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    return read_name(model_id).entry


def checkpoint_name(model_id: str) -> str:
    """Return the name under which an engine loads a model: the given checkpoint's own.

    A short name is replaced by the repository that it stands for, unless it states a format.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    found, name = read_name(model_id), without_address(model_id)
    is_known = found.known.lower() == name.lower()
    if not is_known and (found.stated is not None or "/" in name):
        return name
    return found.repository


def get_model(model_id: str) -> ModelSpec:
    """Return the shape of a catalog model, in the format that its name states.

    Its id is the repository that the name stands for; the limits are those of this repository.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    found, name = read_name(model_id), without_address(model_id)
    spec = _model(found.known)
    if name.lower() == found.known.lower():
        return spec
    note = f"{name} is not an id of the catalog: it is read as "
    if found.stated is None:
        return _noted(spec, f"{note}{found.repository}, whose shape it shares")
    spec = _stated_model(found.known, found.stated)
    wider = ", ".join(module.strip("*.") for module in left_alone(spec, found.stated))
    detail = found.stated.style.detail + (f" and {wider} in 16 bits" if wider else "")
    detail = "as that is stored itself" if spec is _model(found.known) else detail
    note += (
        f"the {found.stated.style.title} checkpoint of {found.repository}, {detail}, as published "
        "ones of such names usually are; give its config.json to have it exactly"
    )
    return _noted(spec, note).model_copy(update={"id": name})


def find_model(model: str | dict[str, Any]) -> ModelSpec | None:
    """Return the shape of a catalog's name or of a config; None where it is unknown.

    >>> find_model("nobody/nothing"), find_model({"model_type": "perceptron"})
    (None, None)
    """
    try:
        return get_model(model) if isinstance(model, str) else model_from_config(model)
    except PlannerError:
        return None


class RotaryEmbedding(NamedTuple):
    """The base of a model's rotary embedding, and its scaling factor; 1 without one."""

    base: int
    factor: float = 1.0


def rotary_embedding(model_id: str) -> RotaryEmbedding | None:
    """Return the rotary embedding of a catalog model, None if the catalog does not know it.

    Other names of a shape may stand for longer contexts, with another base.
    """
    tables, name = data_toml("models.toml"), model_id.strip().removesuffix("-Instruct")
    scaled = tables["rotary_scaling"].get(name)
    if scaled:
        return RotaryEmbedding(scaled["base"], scaled["factor"])
    base = tables["rotary_bases"].get(name)
    return RotaryEmbedding(base) if base else None


def _noted(spec: ModelSpec, note: str) -> ModelSpec:
    """Return a model with a note before its own."""
    return spec.model_copy(update={"note": f"{note}; {spec.note}" if spec.note else note})


@cache
def _model(known: str) -> ModelSpec:
    """Return the model of a catalog name, with the fields in which it differs from its entry."""
    return _spec(known, published_config(known))


@cache
def _stated_model(known: str, stated: StatedFormat) -> ModelSpec:
    """Return a model in a stated format; a generic name of its own format changes nothing."""
    own = _model(known)
    if stated.is_generic and own.weight_dtype == stated.style.dtype:
        return own
    spec = _spec(known, with_format(published_config(known), own, stated))
    source = f"{spec.source}; its format as the name states it"
    return spec.model_copy(update={"source": source, "native_dtype": own.native_dtype})


def published_config(known: str) -> dict[str, Any]:
    """Return the config.json of a model of the catalog, as it was published.

    Raises:
        UnknownModelError: the catalog has no such name.
    """
    entry = get_entry(known)
    config: dict[str, Any] = json.loads(data_text(f"configs/{entry.config}.json"))
    return {**config, **entry.own.get(known, {})}


def config_by_name(repository: str) -> dict[str, Any]:
    """Return the config.json of a repository as its name states it, {} where that is uncertain.

    Certain are the catalog's own repositories, and those of the same owner, or of one whose
    habits the catalog knows, in the format of their names. Copies of others may be stored in
    another.

    >>> config_by_name("Qwen/Qwen3-8B-AWQ")["quantization_config"]["quant_method"]
    'awq'
    >>> config_by_name("unsloth/DeepSeek-V3-bf16"), config_by_name("nobody/nothing")
    ({}, {})
    """
    found = find(repository)
    if found is None:
        return {}
    config, stated = published_config(found.known), found.stated
    if stated is None:
        return config if found.known.lower() == repository.lower() else {}
    is_own = repository.partition("/")[0].lower() == found.known.partition("/")[0].lower()
    return (
        with_format(config, _model(found.known), stated) if is_own or stated.is_publishers else {}
    )


def _spec(known: str, config: dict[str, Any]) -> ModelSpec:
    """Return a catalog model; a repository that names no format is the release itself."""
    found = read_name(known)
    spec = model_from_config(config, found.repository)
    facts: dict[str, Any] = {"source": found.entry.source, "as_of": found.entry.as_of}
    if spec.weight_dtype not in WIDE and split_format(known) is None:
        facts["native_dtype"] = spec.weight_dtype
    return spec.model_copy(update=facts)
