"""What published tables say that a compression scheme costs, by family and size of the model.

The logarithm of the perplexity ratio is taken as a product of what the scheme loses, what the
family loses (Llama-3 more than Llama-2) and a power of the size (larger models never lose more).
The effects are fitted by ``planner.catalog.quality_fit`` and shipped as data.
"""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from planner.catalog.reading import data_json, data_text

LEAST_LOSS = 3e-4  # printed digits do not show less
MOST_LOG_LOSS = 20.0  # beyond, a model writes noise
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
    """One published figure of one compressed model beside its source's own baseline."""

    source: str
    model: str
    billions: float
    scheme: str
    metric: str
    ratio: float

    @property
    def family(self) -> str:
        """Return the family that the row speaks for."""
        return family_of(self.model)

    @property
    def log_loss(self) -> float:
        """Return the logarithm of the logarithm of the ratio, at least of what digits show."""
        return math.log(max(math.log(self.ratio), LEAST_LOSS))


def family_of(name: str) -> str:
    """Return the family of a model's name; an unknown one is its own family.

    >>> family_of("meta-llama/Llama-3.1-8B"), family_of("huggyllama/llama-30b")
    ('llama-3', 'llama-1')
    """
    lower = name.lower()
    found = (family for family, parts in FAMILIES if any(_names(lower, part) for part in parts))
    return next(found, lower)


def _names(name: str, part: str) -> bool:
    """Return whether a name has a part, and its number whole: llama-30b is no llama-3."""
    whole = r"(?!\d)" if part[-1].isdigit() else ""
    return re.search(re.escape(part) + whole, name) is not None


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

    ``spread`` is what is left on sources that a fit did not see, ``borrowed_spread`` on families.
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
    """The effects of every kind."""

    kinds: dict[str, KindFit]

    def is_borrowed(self, scheme: str, family: str) -> bool:
        """Return whether no row of the scheme is of the family."""
        return f"{scheme} {family}" not in self.kinds[kind_of(scheme)].pairs

    def ratio(
        self, scheme: str, family: str, billions: float
    ) -> tuple[float, float, float] | None:
        """Return low, expected and high perplexity ratio, or nothing for an unknown scheme.

        A family without rows of the scheme borrows those of others, for a wider interval.
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
    """Return what a scheme takes away: bits of weights, of activations, of the cache, weights.

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
