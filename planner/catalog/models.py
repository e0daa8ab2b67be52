"""The catalog's models, and the reading of a Hugging Face ``config.json``."""

import json
import re
from collections import ChainMap
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from planner.catalog.families import FAMILIES, NESTED_DEFAULTS, NOT_COVERED, Family
from planner.catalog.format_names import (
    StatedFormat,
    left_alone,
    names_gguf,
    split_format,
    with_format,
)
from planner.catalog.hybrid_layers import read_towers, unknown_encoders
from planner.catalog.layer_groups import (
    LARGEST,
    ConfigReader,
    Fields,
    layer_types,
    read_experts,
    read_layer_groups,
)
from planner.catalog.published_weights import read_published_weights
from planner.catalog.reading import data_text, data_toml, nearest_names
from planner.specs.base import BadConfigError, NotCoveredError, UnknownModelError
from planner.specs.model import ModelSpec

__all__ = [
    "ModelEntry",
    "checkpoint_name",
    "get_model",
    "is_known_model",
    "list_models",
    "model_from_config",
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
# Names of quantised checkpoints that the catalog lacks are read by
# planner/catalog/format_names.py.
# ---------------------------------------------------------------------------


WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)*")
# Words for tuning or format in a name, which do not affect the shape.
SAME_SHAPE = frozenset({"meta", "instruct", "chat", "base", "it", "hf"})


@dataclass(frozen=True)
class ModelEntry:
    """A catalog entry before its config is read."""

    id: str
    config: str
    aliases: tuple[str, ...]
    source: str
    as_of: str
    published_parameters: int | None


@cache
def _entries() -> dict[str, ModelEntry]:
    """Return the catalog by id, in file order."""
    index = data_toml("models.toml")
    source, as_of = index["source"], index["as_of"]
    return {
        row["id"]: ModelEntry(
            id=row["id"],
            config=row.get("config", row["id"].replace("/", "--")),
            aliases=tuple(row.get("aliases", ())),
            source=row.get("source", source),
            as_of=row.get("as_of", as_of),
            published_parameters=row.get("published_parameters"),
        )
        for row in index["models"]
    }


@cache
def _ids_by_name() -> dict[str, str]:
    """Return the catalog ids by every name of a model."""
    entries = _entries().values()
    return {name: entry.id for entry in entries for name in (entry.id, *entry.aliases)}


@cache
def _ids_by_lower_name() -> dict[str, str]:
    return {name.lower(): model_id for name, model_id in _ids_by_name().items()}


def shape_key(name: str) -> tuple[str, ...]:
    """Return the words of a name that determine the shape, without owner and tuning.

    >>> shape_key("NousResearch/Llama-2-7b-chat-hf")
    ('llama', '2', '7', 'b')
    """
    words = WORDS.findall(name.lower().rpartition("/")[2])
    return tuple(word for word in words if word not in SAME_SHAPE)


@cache
def _ids_by_shape() -> dict[tuple[str, ...], str]:
    """Return the ids by unique shape words, with and without a version suffix.

    A name that ends in a version also matches without it.
    """
    ids_by_key: dict[tuple[str, ...], set[str]] = {}
    for name, model_id in _ids_by_name().items():
        key = shape_key(name)
        for shape in {key, _without_version(key)}:
            ids_by_key.setdefault(shape, set()).add(model_id)
    return {key: min(ids) for key, ids in ids_by_key.items() if len(ids) == 1}


def _without_version(key: tuple[str, ...]) -> tuple[str, ...]:
    """Return shape words without a version suffix, which is a number after ``v``.

    >>> _without_version(("mistral", "7", "b", "v", "0.3"))
    ('mistral', '7', 'b')
    """
    starts = [
        at
        for at, (word, after) in enumerate(pairwise(key))
        if at and word == "v" and after[0].isdigit()
    ]
    return key[: starts[0]] if starts else key


@cache
def _ids_without_format() -> dict[tuple[str, ...], str]:
    """Return the ids of checkpoints that name their format, by the shape words before it.

    Unquantised ones come first: every format can take the place of theirs.
    """
    split = [(split_format(name), model_id) for name, model_id in _ids_by_name().items()]
    named = [(*stated, model_id) for stated, model_id in split if stated is not None]
    named.sort(key=lambda each: not each[1].is_plain)
    ids: dict[tuple[str, ...], str] = {}
    for rest, _, model_id in named:
        ids.setdefault(shape_key(rest), model_id)
    return ids


def list_models() -> tuple[ModelEntry, ...]:
    """Return every catalog entry, largest families first as in the data file."""
    return tuple(_entries().values())


def _read(model_id: str) -> tuple[ModelEntry, StatedFormat | None]:
    """Return the entry that a name stands for, and the format that replaces the entry's own.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    found = _find(model_id)
    if found is None:
        raise _unknown(model_id)
    return found


def _find(model_id: str) -> tuple[ModelEntry, StatedFormat | None] | None:
    """Return the entry that a name stands for with its format, None if there is no such name."""
    name = model_id.strip()
    exact, split = _ids_by_lower_name().get(name.lower()), split_format(name)
    is_other_publishers = split is not None and split[1].is_publishers
    known = exact or (None if is_other_publishers else _ids_by_shape().get(shape_key(name)))
    if known is not None:
        return _entries()[known], None
    if split is not None and (base := _base_of(split[0])):
        return _entries()[base], split[1]
    return None


def is_known_model(model_id: str) -> bool:
    """Return whether the catalog has a name, without a search for the nearest ones.

    >>> is_known_model("NousResearch/Llama-2-7b-chat-hf"), is_known_model("my/model-9b")
    (True, False)
    """
    return _find(model_id) is not None


def _base_of(rest: str) -> str | None:
    """Return the id of the model whose checkpoint a name states, None if it is unknown.

    A rest that states another quantisation contradicts the format after it.
    """
    inner = split_format(rest)
    if inner is not None and not inner[1].is_plain:
        return None
    return (
        _ids_by_lower_name().get(rest.lower())
        or _ids_by_shape().get(shape_key(rest))
        or _ids_without_format().get(shape_key(rest))
    )


def _unknown(model_id: str) -> UnknownModelError:
    """Return the error for an unknown name, with the nearest ones."""
    rest = names_gguf(model_id)
    base = _base_of(rest) if rest else None
    if base is not None:
        return UnknownModelError(
            f"{model_id} holds GGUF files of several types: name the model itself, {base}, and "
            "the type of the file as strategy.quantization, such as gguf:q4_k_m",
            "model",
            nearest=(base,),
        )
    nearest = nearest_names(model_id, _ids_by_name())
    return UnknownModelError(
        f"no model {model_id!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
        "any other model can be given as its config.json",
        "model",
        nearest=nearest,
    )


def get_entry(model_id: str) -> ModelEntry:
    """Return the catalog's entry for an id or alias, or for a checkpoint of its model.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    return _read(model_id)[0]


def checkpoint_name(model_id: str) -> str:
    """Return the name under which an engine loads a model: the given checkpoint's own.

    Names that are not a repository are replaced by the catalog's id, unless they state a format.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    entry, stated = _read(model_id)
    name = model_id.strip()
    written = {each.lower(): each for each in (entry.id, *entry.aliases)}.get(name.lower(), name)
    return written if stated is not None or "/" in written else entry.id


def get_model(model_id: str) -> ModelSpec:
    """Return the shape of a catalog model, in the format that its name states.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    entry, stated = _read(model_id)
    name, spec = model_id.strip(), _model(entry.id)
    if name.lower() in _ids_by_lower_name():
        return spec
    note = f"{name} is not an id of the catalog: it is read as "
    if stated is None:
        return _noted(spec, f"{note}{entry.id}, whose shape it shares")
    spec = _stated_model(entry.id, stated)
    wider = ", ".join(module.strip("*.") for module in left_alone(spec, stated))
    detail = stated.style.detail + (f" and {wider} in 16 bits" if wider else "")
    detail = "as that is stored itself" if spec is _model(entry.id) else detail
    note += (
        f"the {stated.style.title} checkpoint of {entry.id}, {detail}, as published ones of such "
        "names usually are; give its config.json to have it exactly"
    )
    return _noted(spec, note).model_copy(update={"id": name})


def _noted(spec: ModelSpec, note: str) -> ModelSpec:
    """Return a model with a note before its own."""
    return spec.model_copy(update={"note": f"{note}; {spec.note}" if spec.note else note})


@cache
def _model(model_id: str) -> ModelSpec:
    return _spec(_entries()[model_id], _config(model_id))


@cache
def _stated_model(model_id: str, stated: StatedFormat) -> ModelSpec:
    """Return a model in a stated format; a generic name of its own format changes nothing."""
    own = _model(model_id)
    if stated.is_generic and own.weight_dtype == stated.style.dtype:
        return own
    spec = _spec(_entries()[model_id], with_format(_config(model_id), own, stated))
    return spec.model_copy(update={"source": f"{spec.source}; its format as the name states it"})


def _config(model_id: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(data_text(f"configs/{_entries()[model_id].config}.json"))
    return config


def _spec(entry: ModelEntry, config: dict[str, Any]) -> ModelSpec:
    spec = model_from_config(config, entry.id)
    return spec.model_copy(update={"source": entry.source, "as_of": entry.as_of})
