"""Published quality losses of compression schemes, by model family and size.

The logarithm of the perplexity ratio is modelled as a product of a scheme effect, a family effect
(Llama-3 loses more than Llama-2) and a power of the size (larger models never lose more). The
effects are fitted by ``planner.catalog.quality_fit`` and shipped as data.
"""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from planner.catalog.reading import data_json, data_text

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
