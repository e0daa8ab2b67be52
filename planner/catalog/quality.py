"""Quality loss of compressed models from published tables; without a table it is unknown."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from planner.catalog.reading import data_json, data_text
from planner.cost.weights import WIDE
from planner.specs.base import PRUNING_METHODS, Dtype
from planner.specs.estimate import Quality

# Published quality losses of compression schemes, by model family and size.
#
# The logarithm of the perplexity ratio is modelled as a product of a scheme effect, a family
# effect (Llama-3 loses more than Llama-2) and a power of the size (larger models never lose more).
# The effects are fitted by ``planner.fitting.quality_fit`` and shipped as data.


LEAST_LOSS = 3e-4  # resolution of printed digits
MOST_LOG_LOSS = 20.0  # beyond this the output is noise
REFERENCE_BILLIONS = 7.0
TAIL = 1.2816  # standard deviations of an 80 % interval
FAMILIES = (
    ("llama-3", ("llama-3", "falcon3")),
    ("llama-2", ("llama-2", "llama2", "longchat", "vila", "codellama")),
    ("llama-1", ("huggyllama", "llama-7b", "llama-13b", "llama-30b", "llama-65b", "vicuna")),
    ("opt", ("opt-",)),
    ("mistral", ("mistral", "mixtral", "codestral")),
    ("qwen", ("qwen",)),
    ("falcon", ("falcon",)),
    ("internlm", ("internlm",)),
    ("gemma", ("gemma",)),
    ("phi", ("phi-", "phi3")),
    ("dbrx", ("dbrx",)),
)


@dataclass(frozen=True)
class QualityRow:
    """One published figure of one compressed model, with its source's own baseline."""

    source: str
    model: str
    billions: float
    scheme: str
    metric: str
    ratio: float

    @property
    def family(self) -> str:
        """Return the model family of the row."""
        return family_of(self.model)

    @property
    def log_loss(self) -> float:
        """Return the log of the log ratio, limited by the printed resolution."""
        return math.log(max(math.log(self.ratio), LEAST_LOSS))


def family_of(name: str) -> str:
    """Return the family of a model's name; an unknown name is its own family.

    >>> family_of("meta-llama/Llama-3.1-8B"), family_of("huggyllama/llama-30b")
    ('llama-3', 'llama-1')
    """
    lower = name.lower()
    families = (
        family for family, parts in FAMILIES if any(_contains_part(lower, part) for part in parts)
    )
    return next(families, lower)


def _contains_part(name: str, part: str) -> bool:
    """Return whether a name contains a part with its whole number (llama-30b is not llama-3)."""
    number_end = r"(?!\d)" if part[-1].isdigit() else ""
    return re.search(re.escape(part) + number_end, name) is not None


@cache
def quality_rows() -> tuple[QualityRow, ...]:
    """Return every published row."""
    return tuple(
        QualityRow(
            source=row["source"],
            model=row["model"],
            billions=float(row["billions"]),
            scheme=row["scheme"],
            metric=row["metric"],
            ratio=float(row["value"]) / float(row["baseline"]),
        )
        for row in csv.DictReader(io.StringIO(data_text("quality.csv")))
    )


@dataclass(frozen=True)
class KindFit:
    """The fitted effects of one kind of scheme, in logarithms of the log ratio.

    ``spread`` is the residual spread on left-out sources, ``borrowed_spread`` that on left-out
    families.
    """

    schemes: dict[str, float]
    families: dict[str, float]
    slope: float
    pairs: Sequence[str]
    spread: float = 0.0
    borrowed_spread: float = 0.0

    def log_loss(self, scheme: str, family: str, billions: float) -> float:
        """Return the expected logarithm of the log ratio."""
        size = math.log(billions / REFERENCE_BILLIONS)
        return self.schemes[scheme] + self.families.get(family, 0.0) + self.slope * size


@dataclass(frozen=True)
class QualityFit:
    """The effects of all kinds."""

    kinds: dict[str, KindFit]

    def is_borrowed(self, scheme: str, family: str) -> bool:
        """Return whether the scheme has no row of the family."""
        return f"{scheme} {family}" not in self.kinds[kind_of(scheme)].pairs

    def ratio(
        self, scheme: str, family: str, billions: float
    ) -> tuple[float, float, float] | None:
        """Return the low, expected and high perplexity ratio, or None for an unknown scheme.

        A family without rows of the scheme uses those of other families, with a wider interval.
        """
        kind = self.kinds.get(kind_of(scheme))
        if kind is None or scheme not in kind.schemes:
            return None
        spread = kind.spread
        if self.is_borrowed(scheme, family):
            spread = max(spread, kind.borrowed_spread) * math.sqrt(2.0)
        middle = kind.log_loss(scheme, family, billions)
        low, mid, high = (
            math.exp(min(math.exp(middle + step * spread), MOST_LOG_LOSS))
            for step in (-TAIL, 0.0, TAIL)
        )
        return low, mid, high


def kind_of(scheme: str) -> str:
    """Return the kind of a scheme: weights, activations, KV cache or pruning.

    >>> kind_of("gguf:q4_k_m"), kind_of("sparsegpt:0.5:2:4"), kind_of("quarot:w4a4kv4")
    ('weights', 'pruning', 'activations')
    """
    method, _, rest = scheme.partition(":")
    if method == "kv":
        return "kv_cache"
    if rest.startswith("0."):
        return "pruning"
    narrow = rest.startswith("w") and not rest.startswith("w4a16")
    return "activations" if narrow or scheme in {"smoothquant", "w8a8"} else "weights"


@cache
def fitted_quality() -> QualityFit:
    """Return the shipped fit."""
    kinds = data_json("quality_factors.json")["kinds"]
    return QualityFit({kind: KindFit(**fields) for kind, fields in kinds.items()})


UNKNOWN = "no published table of {what} in the catalog: measure it on this model"
UNTOUCHED = (1.0, 1.0, 1.0)
FINE_GROUP, WIDE_GROUP = 64, 1024
LLAMA_3_VOCABULARY = 128256
# Schemes by dtype; 8-bit weights are like blocks of 32 with one scale.
SCHEME_BY_DTYPE: dict[str, str] = {
    "int8": "gguf:q8_0",
    "nf4": "nf4",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}
SCHEME_BY_METHOD: dict[str, str] = {
    "nf4": "nf4",
    "fptq": "rptq:w4a8kv8",
    "w4a8": "rptq:w4a8kv8",
    "w8a8": "smoothquant",
    "int8_dynamic": "smoothquant",
    "gguf": "gguf:q4_k_m",
    "qat": "llm-qat:w4a16kv16",
    "llm_pruner": "llm_pruner:0.177:structured",
}
GROUPED_METHODS = frozenset({"gptq", "awq"})
# Methods with tables by whole bits, named with a colon and the mean bits per weight.
ROUNDED_METHODS = frozenset({"gptq", "awq", "aqlm", "vptq", "nf4"})
# Methods without a table, to which tables of rounding or GPTQ do not apply.
UNTABLED_METHODS = frozenset(
    {"norm_tweaking", "finequant", "quantease", "autoround", "qmoe", "sheared_llama"}
)
NAMED_METHODS = GROUPED_METHODS | PRUNING_METHODS | UNTABLED_METHODS | frozenset(SCHEME_BY_METHOD)
DEFAULT_SPARSITY = 0.5
BITS: dict[str, int] = {"int4": 4, "nf4": 4, "int8": 8}
# 8-bit caches have no table. Their expected loss is a quarter of the 4-bit loss (quadratic in the
# step size), and at most the 4-bit loss.
EIGHT_BIT_CACHE_SHARE = 0.25


def family_of_model(name: str, model_type: str, vocab_size: int) -> str:
    """Return the family used in published tables, by name, otherwise by the config.

    >>> family_of_model("custom", "llama", 128256)
    'llama-3'
    """
    family = family_of(name)
    if family != name.lower():
        return family
    if model_type == "llama":
        return "llama-3" if vocab_size == LLAMA_3_VOCABULARY else "llama-2"
    return family_of(model_type)


def weight_scheme(
    weight: Dtype, activation: Dtype, method: str | None, group_size: int | None
) -> str | None:
    """Return the published scheme of a format, or None for unquantised weights."""
    if method and (method in NAMED_METHODS or ":" in method):
        return _scheme_of_method(method, weight, group_size)
    if weight in WIDE:
        return None
    if weight == activation == "int8":
        return "smoothquant"
    if weight == "int4":
        return "gguf:q4_0" if (group_size or 128) <= FINE_GROUP else "rtn-4g"
    return SCHEME_BY_DTYPE.get(weight, weight)


def _scheme_of_method(method: str, weight: Dtype, group_size: int | None) -> str:
    if method in GROUPED_METHODS:
        coarse = group_size is not None and group_size >= WIDE_GROUP
        return f"{method}-{BITS.get(weight, 4)}{'c' if coarse else 'g'}"
    if method in PRUNING_METHODS:
        return pruning_scheme(method, DEFAULT_SPARSITY, "unstructured")
    name, _, bits = method.partition(":")
    if name in ROUNDED_METHODS and bits.replace(".", "", 1).isdigit():
        return _rounded_scheme(name, float(bits))
    return SCHEME_BY_METHOD.get(method, method.lower())


def _rounded_scheme(method: str, bits: float) -> str:
    """Return a method's scheme by mean bits; whole bits mean one scale per channel.

    >>> _rounded_scheme("gptq", 3.15), _rounded_scheme("aqlm", 2.07)
    ('gptq-3g', 'aqlm-2')
    """
    if method == "nf4":
        return "nf4"
    per_group = {"gptq": "c" if bits == int(bits) else "g", "awq": "g"}
    return f"{method}-{int(bits)}{per_group.get(method, '')}"


def pruning_scheme(method: str, sparsity: float, pattern: str) -> str:
    """Return the name of a pruning scheme, such as ``sparsegpt:0.5:2:4``."""
    return f"{method}:{sparsity:g}:{pattern}"


@cache
def scheme_quality(scheme: str | None, family: str, billions: float) -> Quality:
    """Return the quality loss of a published scheme for a model family and size."""
    if scheme is None:
        return Quality(perplexity_ratio=UNTOUCHED, evidence=("weights are not quantised",))
    ratio = fitted_quality().ratio(scheme, family, billions)
    if ratio is not None:
        return Quality(perplexity_ratio=ratio, evidence=_evidence(scheme, family))
    rows = [row for row in quality_rows() if row.scheme == scheme and row.metric == "score"]
    own = [row.ratio for row in rows if row.family == family]
    scores = own or [row.ratio for row in rows]
    if not scores:
        return Quality(evidence=(UNKNOWN.format(what=scheme.replace("_", " ")),))
    sources = ", ".join(_sources(scheme, "score"))
    middle = median(scores)
    low = min(*scores, middle - LEAST_LOSS)
    return Quality(
        score_ratio=(low, middle, max(*scores, middle + LEAST_LOSS)),
        evidence=(
            f"no perplexity table; task scores of {scheme.upper()}, {len(scores)} rows: {sources}",
        ),
    )


def native_quality(dtype: Dtype) -> Quality:
    """Return the quality of the weights of a release in its own narrow format: the baseline."""
    evidence = f"{dtype} is the format of the release, to which losses are relative"
    return Quality(perplexity_ratio=UNTOUCHED, evidence=(evidence,))


def _sources(scheme: str, metric: str) -> list[str]:
    return sorted({r.source for r in quality_rows() if r.scheme == scheme and r.metric == metric})


def _evidence(scheme: str, family: str) -> tuple[str, ...]:
    rows = [r for r in quality_rows() if r.scheme == scheme and r.metric == "perplexity"]
    sources = ", ".join(_sources(scheme, "perplexity"))
    published = f"published perplexities of {scheme.upper()}, {len(rows)} rows: {sources}"
    if not fitted_quality().is_borrowed(scheme, family):
        return (published,)
    others = ", ".join(sorted({row.family for row in rows}))
    return (published, f"none is of {family}: borrowed from {others}, with a wider interval")


def weight_quality(
    weight: Dtype,
    activation: Dtype,
    method: str | None,
    *,
    family: str = "llama-2",
    billions: float = 7.0,
    group_size: int | None = None,
) -> Quality:
    """Return the quality loss of weights quantised by a method, or by rounding."""
    scheme = weight_scheme(weight, activation, method, group_size)
    return scheme_quality(scheme, family, billions)


def kv_cache_quality(
    kv_cache: Dtype | None, *, family: str = "llama-2", billions: float = 7.0
) -> Quality:
    """Return the quality loss of a quantised KV cache."""
    if kv_cache is None or kv_cache in WIDE:
        return Quality(perplexity_ratio=UNTOUCHED)
    if kv_cache != "int8":
        return scheme_quality(f"kv:{kv_cache}", family, billions)
    four_bit = scheme_quality("kv:int4", family, billions)
    _, middle, _ = four_bit.perplexity_ratio or UNTOUCHED
    expected = 1.0 + EIGHT_BIT_CACHE_SHARE * (middle - 1.0)
    return Quality(
        perplexity_ratio=(1.0, expected, middle),
        evidence=(
            "no table of 8-bit integer caches; at most what 4 bits lose:",
            *four_bit.evidence,
        ),
    )


def pruning_quality(
    sparsity: float | None, *, method: str, pattern: str, family: str, billions: float
) -> Quality:
    """Return the quality loss of pruning; unknown for an untabulated sparsity."""
    if not sparsity:
        return Quality(perplexity_ratio=UNTOUCHED)
    return scheme_quality(pruning_scheme(method, sparsity, pattern), family, billions)


def combined_quality(*parts: Quality) -> Quality:
    """Return the product of all effects; unknown if any effect is unknown."""
    evidence = tuple(line for part in parts for line in part.evidence)
    ratios = [part.perplexity_ratio for part in parts]
    if all(ratios):
        return Quality(perplexity_ratio=_product(ratios), evidence=evidence)
    losses = [part.as_score for part in parts]
    if all(losses):
        return Quality(score_ratio=_product(losses), evidence=evidence)
    return Quality(evidence=evidence)


def _product(
    ratios: list[tuple[float, float, float] | None],
) -> tuple[float, float, float]:
    low = middle = high = 1.0
    for ratio in ratios:
        if ratio is not None:
            low, middle, high = low * ratio[0], middle * ratio[1], high * ratio[2]
    return low, middle, high
