"""FlexGen's published T4 rows compared with the planner's figures, for the accuracy page."""

from dataclasses import dataclass
from functools import cache

from planner.fitting.evidence import Row, number, table
from planner.search.placement import Placement, best_batch
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.workload.estimator import estimate_request

SOURCE = "flexgen-readme"
# The host of these rows, n1-standard-32; disk rate from the paper's section 6.
T4_HOST: JsonObject = {
    "device": "t4",
    "host_memory_bytes": 208_000_000_000,
    "host_memory_bandwidth_bytes_per_second": 100e9,
    "disk_bandwidth_bytes_per_second": 2e9,
    "disk_capacity_bytes": 1_500_000_000_000,
}
# The policies of the rows (FlexLLMGen benchmark/flexgen/bench_suite.py): micro-batch, shares.
POLICIES: dict[tuple[str, str], JsonObject] = {
    ("flexgen", "facebook/opt-6.7b"): {"micro_batch_size": 2},
    ("flexgen", "facebook/opt-30b"): {
        "micro_batch_size": 48,
        "offload": {"weights_cpu": 0.8, "kv_cpu": 1.0, "activations_cpu": 1.0},
    },
    ("flexgen", "facebook/opt-175b"): {
        "micro_batch_size": 32,
        "offload": {
            "weights_cpu": 0.5,
            "weights_disk": 0.5,
            "kv_disk": 1.0,
            "activations_cpu": 1.0,
        },
    },
    ("flexgen_with_compression", "facebook/opt-6.7b"): {"micro_batch_size": 72},
    ("flexgen_with_compression", "facebook/opt-30b"): {
        "micro_batch_size": 64,
        "weight_dtype": "fp16",
        "offload": {"weights_cpu": 1.0, "kv_cpu": 1.0, "activations_cpu": 1.0},
    },
    ("flexgen_with_compression", "facebook/opt-175b"): {
        "micro_batch_size": 48,
        "offload": {"weights_cpu": 1.0, "kv_cpu": 1.0, "activations_cpu": 1.0},
    },
}
# Weight placement of the other engines, by the tier named in the row.
TIERS = {"GPU": {}, "CPU": {"weights_cpu": 1.0}, "disk": {"weights_disk": 1.0}}
OVER_HOSTS = "petals"  # several servers over a network, not a placement on one host
BLOCKS = {"facebook/opt-6.7b": (2, 8, 16), "facebook/opt-30b": (96, 144, 192, 256)}
LARGEST_BLOCKS = (64, 128, 192, 256)


@dataclass(frozen=True)
class Reproduced:
    """One published row and its estimate."""

    engine: str
    model: str
    batch: int
    measured: float
    estimate: Estimate

    @property
    def predicted(self) -> float:
        """Return the predicted tokens per second."""
        return self.estimate.performance.tokens_per_second or 0.0

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted / self.measured - 1

    def line(self) -> str:
        """Return the row of the accuracy page."""
        fits = "yes" if self.estimate.fits else "no"
        return (
            f"| {self.engine} | {self.model} | {self.batch} | {self.measured:.2f} | "
            f"{self.predicted:.2f} | {self.error:+.0%} | {fits} |"
        )


def offload_request(row: Row) -> JsonObject:
    """Return a row as a request with its published policy."""
    packed = row["engine"] == "flexgen_with_compression"
    tier = row["mode"].rpartition(": ")[2]
    own = POLICIES.get((row["engine"], row["model"]), {"offload": TIERS.get(tier, {})})
    narrow: JsonObject = {"weight_dtype": "int4", "group_size": 64} if packed else {}
    return {
        "id": row["row_id"],
        "model": row["model"],
        "cluster": T4_HOST,
        "workload": {
            "kind": "generate",
            "batch_size": int(number(row, "batch_or_concurrency")),
            "input_tokens": int(row["input_len"]),
            "output_tokens": int(row["output_len"]),
        },
        "strategy": {
            "weight_dtype": "fp16",
            "kv_cache_dtype": "int4" if packed else "fp16",
            **narrow,
            **own,
        },
        "engine": row["engine"],
    }


@cache
def reproduced() -> tuple[Reproduced, ...]:
    """Return every single-host row of the source with its estimate."""
    rows = []
    for row in table("inference_other"):
        if row["source_id"] != SOURCE or row["engine"] == OVER_HOSTS:
            continue
        request = EstimateRequest.model_validate(offload_request(row))
        batch = int(number(row, "batch_or_concurrency"))
        answer = estimate_request(request, explain=False)
        rows.append(Reproduced(row["engine"], row["model"], batch, number(row, "value"), answer))
    return tuple(rows)


def own_policy(model: str) -> Placement | None:
    """Return the planner's choice of block, micro-batch and shares on the same host."""
    request = EstimateRequest.model_validate(
        {
            "model": model,
            "cluster": T4_HOST,
            "workload": {
                "kind": "generate",
                "batch_size": 1,
                "input_tokens": 512,
                "output_tokens": 32,
            },
            "strategy": {"weight_dtype": "fp16", "kv_cache_dtype": "fp16"},
            "engine": "flexgen",
        }
    )
    return best_batch(request, BLOCKS.get(model, LARGEST_BLOCKS))


def flexgen_table() -> str:
    """Return published rows, predictions and the planner's own policies, as Markdown."""
    lines = [
        "## Offloading on one T4\n",
        "Generated tokens per second of 512 + 32 tokens; arXiv:2303.06865, FlexLLMGen README.",
        "Three figures of the engine were set on these rows (`flexgen` in",
        "`planner/catalog/data/engines.toml`): they show what the formulas express. The rows of",
        "the other engines were not looked at.\n",
        "| Engine | Model | Batch | Published | Predicted | Error | Fits |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [each.line() for each in reproduced()]
    lines.append("\nThe planner's own policy, by linear programme, on the same host:\n")
    lines.append(
        "| Model | Block | Micro-batch | Weights host, disk | Cache host, disk | Token/s |"
    )
    lines.append("|---|---|---|---|---|---|")
    lines += [_policy_row(model) for model in sorted({each.model for each in reproduced()})]
    return "\n".join(lines) + "\n"


def _policy_row(model: str) -> str:
    chosen = own_policy(model)
    if chosen is None:
        return f"| {model} | none fits | | | | |"
    speed, offload = chosen.estimate.performance, chosen.offload
    block = round((speed.requests_per_second or 0.0) * (speed.latency_seconds or 0.0))
    return (
        f"| {model} | {block} | {chosen.micro_batch_size} | {offload.weights_cpu:.0%}, "
        f"{offload.weights_disk:.0%} | {offload.kv_cpu:.0%}, {offload.kv_disk:.0%} | "
        f"{speed.tokens_per_second:.2f} |"
    )
