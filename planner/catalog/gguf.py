"""Packed weight formats, and row-exact sizes of GGUF files."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from statistics import fmean

from planner.catalog.reading import data_toml, nearest_names
from planner.cost.parameters import (
    ParameterCounts,
    count_mixer,
    count_parameters,
    feed_forward_matrices,
)
from planner.cost.weights import BITS_PER_BYTE
from planner.specs.base import Dtype, UnknownNameError
from planner.specs.model import (
    AttentionLayers,
    LatentLayers,
    LayerGroup,
    ModelSpec,
    RecurrentLayers,
    WeightPart,
)

# Bits per weight and weights per block of each type: ggml/src/ggml-common.h.
BLOCKS: dict[str, tuple[float, int]] = {
    "f32": (32.0, 1),
    "f16": (16.0, 1),
    "bf16": (16.0, 1),
    "q8_0": (8.5, 32),
    "q5_1": (6.0, 32),
    "q5_0": (5.5, 32),
    "q4_1": (5.0, 32),
    "q4_0": (4.5, 32),
    "iq4_nl": (4.5, 32),
    "mxfp4": (4.25, 32),
    "q6_k": (6.5625, 256),
    "q5_k": (5.5, 256),
    "q4_k": (4.5, 256),
    "q3_k": (3.4375, 256),
    "q2_k": (2.625, 256),
    "iq4_xs": (4.25, 256),
    "iq3_s": (3.4375, 256),
    "iq3_xxs": (3.0625, 256),
    "iq2_s": (2.5625, 256),
    "iq2_xs": (2.3125, 256),
    "iq2_xxs": (2.0625, 256),
    "iq1_m": (1.75, 256),
    "iq1_s": (1.5625, 256),
}
# The file types that a plan chooses among, widest first: those that most repositories offer, with
# measured losses. Narrower ones are pinned.
USUAL_TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m")
# The type of rows that are not a multiple of a block of 256.
FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
# The default type of each file type; files of other types have the type's own name.
DEFAULTS = {
    "q2_k_s": "q2_k",
    "q3_k_s": "q3_k",
    "q3_k_m": "q3_k",
    "q3_k_l": "q3_k",
    "q4_k_s": "q4_k",
    "q4_k_m": "q4_k",
    "q5_k_s": "q5_k",
    "q5_k_m": "q5_k",
    "iq2_s": "iq2_xs",
    "iq2_m": "iq2_s",
    "iq3_xs": "iq3_s",
    "iq3_m": "iq3_s",
    "mxfp4_moe": "mxfp4",
}
FLOATS = frozenset({"f32", "f16", "bf16"})
TWO_BIT = frozenset({"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m"})
WIDER_TWO_BIT = frozenset({"iq2_s", "iq2_m"})
SMALL_BITS = 32.0
MANY_QUERIES = 4  # query heads per key-value head from which values take more bits
MIXTRAL_EXPERTS = 8
LAYERS_OF_70B = 80
# Families whose converters keep query, key and value in one tensor.
FUSED_QKV = frozenset({"bloom", "chatglm", "dbrx", "falcon", "gpt2", "gpt_neox", "mpt", "phi3"})
# Families whose recurrent layers project queries, keys and values in one tensor.
DELTA_NETS = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
# Families whose checkpoints and files both store experts in MXFP4, whatever the file type.
MXFP4_EXPERTS = frozenset({"gpt_oss"})
# Value projections with many query heads per key-value head, and with few.
VALUES = {
    "q2_k": ("q4_k", "q3_k"),
    "q2_k_s": ("q4_k", "q2_k"),
    "iq3_xxs": ("q4_k", "iq3_xxs"),
    "iq3_xs": ("q4_k", "iq3_s"),
    "iq3_s": ("q4_k", "iq3_s"),
    "iq4_nl": ("q5_k", "iq4_nl"),
    "iq4_xs": ("q5_k", "iq4_xs"),
}
# Value projections of the first layers, and of the others.
FIRST_VALUES = {
    "q3_k_m": (2, "q5_k", "q4_k"),
    "q3_k_l": (0, "q5_k", "q5_k"),
    "q4_k_s": (4, "q5_k", "q4_k"),
    "iq3_m": (0, "q4_k", "q4_k"),
}
OUTPUTS = {
    "q2_k": "q3_k",
    "q3_k_m": "q4_k",
    "q3_k_l": "q5_k",
    "iq3_xxs": "iq3_s",
    "iq3_m": "q4_k",
}
MIXTRAL_OUTPUTS = frozenset(
    {"q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m"}
    | {"iq3_xxs", "iq3_xs", "iq3_s", "iq3_m", "iq4_nl", "iq4_xs"}
)


@dataclass(frozen=True)
class Tensor:
    """One kind of tensor: its role, row width, weights per layer and number of layers.

    ``order`` are the layers' positions that the rules see, out of ``total``. If it is longer than
    ``count``, the layers are among these positions, and their types are averaged over them.
    """

    role: str
    part: WeightPart
    row: int
    elements: int
    count: int
    order: range
    total: int


@dataclass(frozen=True)
class FileSizes:
    """The mean bits per weight of each part of a file; ``dense`` are all layers but experts."""

    dense_bits: float
    expert_bits: float
    linear_bits: float
    embedding_bits: float
    head_bits: float
    small_bits: float


def supports(kind: str) -> bool:
    """Return whether llama.cpp writes such a file; forks have further types."""
    return DEFAULTS.get(kind, kind) in BLOCKS


def file_type(text: str) -> str | None:
    """Return the catalog's name of a type of GGUF files as people write it, None if unknown.

    Unsloth's own mixes are named ``UD-``, often without it; those of the catalog's types that
    they only label so are the types themselves.

    >>> file_type("UD-Q4_K_XL"), file_type("Q4_K_XL"), file_type("UD-Q5_K_M"), file_type("Q9_K")
    ('ud-q4_k_xl', 'ud-q4_k_xl', 'q5_k_m', None)
    """
    table: dict[str, list[float]] = data_toml("packed.toml")["gguf"]
    kind = text.lower().replace("ud_", "ud-")
    kind = "mxfp4_moe" if kind == "mxfp4" else kind  # the only files of this type
    for name in (kind, f"ud-{kind}", kind.removeprefix("ud-")):
        if name in table or supports(name):
            return name
    return None


def file_sizes(kind: str, model: ModelSpec) -> FileSizes:
    """Return the mean bits of the parts of a model's file.

    >>> from planner.catalog.models import get_model
    >>> round(file_sizes("q4_k_m", get_model("Qwen/Qwen2.5-0.5B")).linear_bits, 2)
    5.52
    """
    mix, counts = Mix(kind, model), count_parameters(model)
    stored = {True: 0.0, False: 0.0}
    for tensor in _tensors(model):
        each = fmean(mix.bits(tensor, position) for position in tensor.order)
        stored[tensor.part == "experts"] += each * tensor.elements * tensor.count
    head = mix.wide(mix.head_type, model.hidden_size)
    token = head if model.tie_word_embeddings else mix.wide(mix.token_type, model.hidden_size)
    positions = model.learned_positions
    linear = sum(stored.values()) / max(1, counts.layer_linear)
    dense = counts.layer_linear - counts.experts
    return FileSizes(
        dense_bits=stored[False] / dense if dense else linear,
        expert_bits=stored[True] / counts.experts if counts.experts else linear,
        linear_bits=linear,
        embedding_bits=(token * model.vocab_size + SMALL_BITS * positions)
        / (model.vocab_size + positions),
        head_bits=head,
        small_bits=_small_bits(model, counts, token),
    )


def file_bytes(kind: str, model: ModelSpec) -> float:
    """Return the bytes of all weights in a language model's file, without its tokenizer.

    Encoders of images and sounds are in a file of their own.
    """
    model = model.model_copy(update={"tower_parameters": 0})
    counts, sizes = count_parameters(model), file_sizes(kind, model)
    layers = counts.layer_linear * sizes.linear_bits + counts.small * sizes.small_bits
    vocabulary = counts.head * sizes.head_bits + counts.embedding * sizes.embedding_bits
    return (layers + vocabulary) / BITS_PER_BYTE


def _small_bits(model: ModelSpec, counts: ParameterCounts, token: float) -> float:
    """Return the mean bits of small tensors; a table of embeddings per layer is none of them."""
    table = model.extra_parameters
    if table < model.vocab_size * model.num_hidden_layers or not counts.small:
        return SMALL_BITS
    return (table * token + (counts.small - table) * SMALL_BITS) / counts.small


@dataclass(frozen=True)
class Mix:
    """The rules of one file type for one model."""

    kind: str
    model: ModelSpec

    @cached_property
    def default(self) -> str:
        """Return the type of tensors without a rule of their own."""
        return DEFAULTS.get(self.kind, self.kind)

    @cached_property
    def queries_per_key(self) -> int:
        """Return the query heads per key-value head."""
        return self.model.num_attention_heads // self.model.num_key_value_heads

    @property
    def has_eight_experts(self) -> bool:
        """Return whether the rules for Mixtral's number of experts apply."""
        return self.model.num_experts == MIXTRAL_EXPERTS

    @property
    def head_type(self) -> str:
        """Return the type of the output head, and of an embedding that is also the head."""
        if self.default in FLOATS:
            return self.default
        block = BLOCKS[self.default][1]
        falcon = self.model.model_type == "falcon"
        if self.kind == "mxfp4_moe" or falcon or self.model.hidden_size % block:
            return "q8_0"
        if self.kind in TWO_BIT or self.kind == "iq3_xxs":
            return "q5_k"
        return self.default if self.default == "q8_0" else "q6_k"

    @property
    def token_type(self) -> str:
        """Return the type of a token embedding with a head of its own."""
        if self.kind == "mxfp4_moe":
            return "q8_0"
        if self.kind in WIDER_TWO_BIT or self.kind == "iq3_xxs":
            return "iq3_s"
        return "q2_k" if self.kind in TWO_BIT else self.default

    def bits(self, tensor: Tensor, position: int) -> float:
        """Return the bits per weight of a tensor in one layer."""
        return self.wide(self._type(tensor, position), tensor.row)

    def wide(self, chosen: str, row: int) -> float:
        """Return the bits per weight of a type, or of its fallback for rows of other widths."""
        if row % BLOCKS[chosen][1]:
            chosen = FALLBACKS.get(chosen, "iq4_nl")
        return BLOCKS[chosen][0] if row % BLOCKS[chosen][1] == 0 else BLOCKS["f16"][0]

    def _type(self, tensor: Tensor, position: int) -> str:
        if self.default in FLOATS:
            return self.default
        experts = tensor.part == "experts"
        if experts and self.model.model_type in MXFP4_EXPERTS:
            return "mxfp4"
        if self.kind == "mxfp4_moe":
            return "mxfp4" if experts else "q8_0"
        choose = {
            "value": self._value,
            "query": self._query,
            "key": self._key,
            "output": self._output,
            "down": self._down,
            "up": self._up,
        }.get(tensor.role)
        return choose(position, tensor.total) if choose else self.default

    def _value(self, at: int, total: int) -> str:
        """Return the type of value projections, and of those fused with query and key."""
        many = self.queries_per_key >= MANY_QUERIES
        if self.kind in TWO_BIT:
            if many or self.model.num_experts >= MANY_QUERIES:
                return "q4_k"
            return "iq3_s" if self.kind in WIDER_TWO_BIT else "q2_k"
        chosen = VALUES[self.kind][not many] if self.kind in VALUES else self.default
        if self.kind in {"q4_k_m", "q5_k_m"} and _takes_more_bits(at, total):
            chosen = "q6_k"
        elif self.kind in FIRST_VALUES:
            first, wider, narrower = FIRST_VALUES[self.kind]
            chosen = wider if at < first else narrower
        if self._is_70b and chosen in {"q3_k", "q4_k"}:
            chosen = "q5_k"
        return "q8_0" if self.has_eight_experts else chosen

    @cached_property
    def _is_70b(self) -> bool:
        deep = self.model.num_hidden_layers == LAYERS_OF_70B
        return deep and self.queries_per_key > 1 and self.model.model_type in {"llama", "qwen2"}

    def _query(self, at: int, total: int) -> str:
        del at, total
        return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(self.kind, self.default)

    def _key(self, at: int, total: int) -> str:
        if self.has_eight_experts:
            return "q4_k" if self.kind in TWO_BIT else "q8_0"
        return self._query(at, total)

    def _output(self, at: int, total: int) -> str:
        del at, total
        if self.kind in TWO_BIT:
            if self.has_eight_experts:
                return "q5_k"
            other = "iq2_xxs" if self.kind in {"iq1_s", "iq1_m"} else self.default
            return "iq3_s" if self.kind in WIDER_TWO_BIT else other
        if self.model.model_type == "falcon":
            return "q4_k" if self.kind == "q3_k_l" else self.default
        if self.has_eight_experts:
            return "q5_k" if self.kind in MIXTRAL_OUTPUTS else self.default
        return OUTPUTS.get(self.kind, self.default)

    def _down(self, at: int, total: int) -> str:
        """Return the type of the down projection of feed-forward blocks and experts."""
        earliest, first = at < total // 16, at < total // 8
        more = _takes_more_bits(at, total)
        falcon, eight = self.model.model_type == "falcon", self.has_eight_experts
        rules: dict[str, tuple[tuple[bool, str], ...]] = {
            "q2_k": ((True, "q3_k"),),
            "q2_k_s": ((first, "q4_k"),),
            "q3_k_m": ((earliest, "q5_k"), (more or not falcon, "q4_k")),
            "q3_k_l": ((falcon, "q4_k"), (True, "q5_k")),
            "q4_k_s": ((first and not falcon, "q5_k"),),
            "q4_k_m": ((earliest and falcon, "q6_k"), (more, "q5_k" if falcon else "q6_k")),
            "q5_k_m": ((more, "q6_k"),),
            "iq4_nl": ((first, "q5_k"),),
            "iq4_xs": ((first, "q5_k"),),
            "iq3_m": ((first or (eight and more), "q4_k"),),
        }
        wider = "iq3_s" if self.kind in WIDER_TWO_BIT else "q2_k"
        two_bit = ((first, wider),) if self.kind in TWO_BIT else ()
        chosen = (type_name for holds, type_name in rules.get(self.kind, two_bit) if holds)
        return next(chosen, self.default)

    def _up(self, at: int, total: int) -> str:
        middle = total // 8 <= at < 7 * total // 8
        return "iq3_xxs" if self.kind == "iq3_xs" and middle else self.default


def _takes_more_bits(at: int, total: int) -> bool:
    """Return whether a layer is one of the first, the last or each third in between."""
    eighth = total // 8
    return at < eighth or at >= 7 * total // 8 or (at - eighth + 1) % 3 == 0


def _tensors(model: ModelSpec) -> Iterator[Tensor]:
    """Yield the quantised tensors of the layers; their elements add up to the model's counts."""
    groups = model.layers_by_attention
    with_values = sum(group.count for group in groups if _has_values(model, group))
    for group in groups:
        order = range(with_values or 1)
        for role, row, elements in _mixer(model, group):
            yield Tensor(role, "attention", row, elements, group.count, order, len(order))
    layers, hidden, dense = model.num_hidden_layers, model.hidden_size, model.num_dense_layers
    wide = _block(model, hidden, model.intermediate_size)
    shared = _block(model, hidden, model.shared_intermediate_size)
    width = model.expert_hidden_size or hidden
    experts = _block(model, width, model.moe_intermediate_size)
    first = model.num_feed_forward_layers
    for role, row, elements in wide if first else ():
        yield Tensor(role, "feed_forward", row, elements, first, range(first), layers)
    sparse, among = model.num_moe_layers, range(dense, layers)
    for role, row, elements in shared if sparse else ():
        yield Tensor(role, "feed_forward", row, elements, sparse, among, layers)
    for role, row, elements in experts if sparse else ():
        yield Tensor(role, "experts", row, elements * model.num_experts, sparse, among, layers)
    if model.expert_hidden_size:
        for row in (hidden, width):
            yield Tensor("other", "attention", row, hidden * width, sparse, among, layers)


def _block(model: ModelSpec, hidden: int, inner: int) -> list[tuple[str, int, int]]:
    """Return role, row width and elements of the tensors of a feed-forward block."""
    into = (feed_forward_matrices(model) - 1) * hidden * inner
    return [("up", hidden, into), ("down", inner, hidden * inner)] if inner else []


def _has_values(model: ModelSpec, group: LayerGroup) -> bool:
    """Return whether a layer has a tensor that the rules take for a value projection."""
    if isinstance(group, AttentionLayers):
        return model.model_type in FUSED_QKV or not (group.value_is_key or group.reuses_cache)
    return isinstance(group, RecurrentLayers) and _is_delta_net(model)


def _is_delta_net(model: ModelSpec) -> bool:
    """Return whether recurrent layers project queries, keys and values in one tensor."""
    return model.model_type in DELTA_NETS


def _mixer(model: ModelSpec, group: LayerGroup) -> Iterator[tuple[str, int, int]]:
    """Yield role, row width and elements of each projection of a layer's token mixer."""
    hidden, counts = model.hidden_size, count_mixer(model, group)
    if isinstance(group, AttentionLayers):
        out = group.heads * group.value_dim
        query = counts.split - hidden * out
        if model.model_type in FUSED_QKV:
            yield "value", hidden, query + counts.key_value
        else:
            values = counts.key_value and hidden * group.kv_heads * group.value_dim
            values = 0 if group.value_is_key else values
            yield "query", hidden, query
            yield "key", hidden, counts.key_value - values
            yield "value", hidden, values
        yield "output", out, hidden * out
    elif isinstance(group, LatentLayers):
        yield from _latent(model, group)
    elif isinstance(group, RecurrentLayers):
        inner = group.num_heads * group.value_dim
        fused = hidden * group.conv_channels if _is_delta_net(model) else 0
        yield "value", hidden, fused
        yield "other", hidden, counts.split - hidden * inner - fused
        yield "other", inner, hidden * inner
    else:
        yield "other", hidden, counts.split + counts.replicated


def _latent(model: ModelSpec, group: LatentLayers) -> Iterator[tuple[str, int, int]]:
    """Yield the projections of latent attention, its key and value parts apart."""
    hidden, heads, rank = model.hidden_size, group.heads, group.kv_lora_rank
    counts = count_mixer(model, group)
    keys, values = heads * group.qk_nope_head_dim * rank, heads * group.v_head_dim * rank
    out = heads * group.v_head_dim
    queries = counts.split - keys - values - hidden * out
    yield "other", hidden, counts.replicated
    yield "other" if group.q_lora_rank else "query", group.q_lora_rank or hidden, queries
    yield "other", group.qk_nope_head_dim, keys
    yield "other", rank, values
    yield "output", out, hidden * out


# Packed weight formats: GGUF mixes, and formats given by their mean bits.
#
# ``gguf:q4_k_m`` has its usual sizes in the catalog and those of a model from its row widths
# (planner/catalog/gguf.py), ``gguf:3.9`` is a mix of 3.9 bits on average. ``exl2:4.25`` (or any
# other method with a number) stores 4.25 bits per linear weight, and 16 bits per weight of
# embedding and head.


PLAIN_BITS = 16.0
MIXED_HEAD_BITS = 6.5625  # bits of the output head in GGUF mixes
FEWEST_BITS, MOST_BITS = 0.5, 32.0
# The nearest dtype of a packed format, where only a dtype is possible: (bits below, dtype).
NOMINAL: tuple[tuple[float, Dtype], ...] = ((2.0, "ternary"), (6.0, "int4"), (9.0, "int8"))


@dataclass(frozen=True)
class PackedFormat:
    """The mean bits per weight, by part of the model.

    ``dense_bits`` and ``expert_bits`` divide the linear weights where a file's sizes are known;
    ``small_bits`` are those of norms, biases and routers.
    """

    linear_bits: float
    embedding_bits: float
    head_bits: float
    small_bits: float = PLAIN_BITS
    dense_bits: float | None = None
    expert_bits: float | None = None

    @property
    def linear_bytes_per_element(self) -> float:
        """Return the bytes per linear weight of a layer, including scales."""
        return self.linear_bits / BITS_PER_BYTE

    @property
    def head_bytes_per_element(self) -> float:
        """Return the bytes per weight of the output head or of a tied embedding."""
        return self.head_bits / BITS_PER_BYTE

    @property
    def vocabulary_bytes_per_element(self) -> float:
        """Return the mean bytes per weight of an untied embedding and output head."""
        return (self.embedding_bits + self.head_bits) / 2 / BITS_PER_BYTE

    @property
    def nominal(self) -> Dtype:
        """Return the dtype nearest to the linear weights.

        >>> PackedFormat(4.8, 4.5, 6.5625).nominal
        'int4'
        """
        return next((dtype for most, dtype in NOMINAL if self.linear_bits < most), "fp16")


def packed_format(quantization: str | None, model: ModelSpec | None = None) -> PackedFormat | None:
    """Return the sizes of a packed format, or None for names without a colon.

    With a model, GGUF sizes are those of its own file: types depend on the width of its rows.

    Raises:
        UnknownNameError: the catalog has no such GGUF type, or the bits are out of range.
    """
    usual = _usual_format(quantization)
    method, _, kind = (quantization or "").lower().partition(":")
    kind = (file_type(kind) if method == "gguf" else None) or kind
    if model is not None and model.model_type in MXFP4_EXPERTS and kind.startswith("ud-"):
        kind = "q8_0"  # beside the experts, which no mix changes
    if usual is None or model is None or method != "gguf" or not supports(kind):
        return usual
    return _format_of_file(kind, model.model_copy(update={"part_dtypes": ()}))


@lru_cache(maxsize=1024)
def _format_of_file(kind: str, model: ModelSpec) -> PackedFormat:
    """Return the sizes of a model's GGUF file; a dict in the model could not be hashed."""
    sizes = file_sizes(kind, model)
    return PackedFormat(
        sizes.linear_bits,
        sizes.embedding_bits,
        sizes.head_bits,
        sizes.small_bits,
        sizes.dense_bits,
        sizes.expert_bits,
    )


@cache
def _usual_format(quantization: str | None) -> PackedFormat | None:
    method, colon, kind = (quantization or "").lower().partition(":")
    if not colon:
        return None
    table: dict[str, list[float]] = data_toml("packed.toml").get(method, {})
    kind = (file_type(kind) if method == "gguf" else None) or kind
    if kind in table:
        return PackedFormat(*table[kind])
    bits = _number(kind)
    if not method or not FEWEST_BITS <= bits <= MOST_BITS:
        nearest = nearest_names(kind, tuple(table))
        raise UnknownNameError(
            f"quantization is {quantization!r}: {method} has no such format; "
            + (f"nearest: {', '.join(nearest)}" if nearest else "give bits, as in exl2:4.25"),
            "strategy.quantization",
            nearest=nearest,
        )
    if table:  # a mix with these mean bits: embedding and head as in the method's mixes
        return PackedFormat(bits, min(bits, PLAIN_BITS), max(bits, MIXED_HEAD_BITS))
    return PackedFormat(bits, PLAIN_BITS, PLAIN_BITS)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
