"""Short ways to ask the planner, so that each test shows only what it is about."""

from planner.api import estimate, plan
from planner.catalog.engines import serving_engine
from planner.search.space import FRUGAL
from planner.specs.estimate import Estimate, EstimateRequest, PlanAnswer, PlanRequest

LLAMA_8B = "meta-llama/Llama-3.1-8B"
LLAMA_70B = "meta-llama/Llama-3.1-70B"
LLAMA_405B = "meta-llama/Llama-3.1-405B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
SERVE = {"kind": "serve", "input_tokens": 1024, "output_tokens": 128, "concurrency": 16}
GENERATE = {"kind": "generate", "batch_size": 1, "input_tokens": 128, "output_tokens": 64}
TRAIN = {"kind": "train", "sequence_length": 2048, "global_batch_size": 16, "method": "full"}
TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
# A device of round figures, for what is computed by hand.
CARD = {
    "id": "card",
    "memory_bytes": 80 * 1024**3,
    "memory_bandwidth_bytes_per_second": 2e12,
    "peak_flops_per_second": {"bf16": 5e14},
    "intra_node_bandwidth_bytes_per_second": 300e9,
    "host_to_device_bandwidth_bytes_per_second": 25e9,
}
# What a micro-benchmark measured on one core of a server processor.
CPU = {
    "id": "this-host",
    "kind": "cpu",
    "memory_bytes": 16 * 1024**3,
    "memory_bandwidth_bytes_per_second": 20e9,
    "peak_flops_per_second": {"fp32": 1.0e11, "bf16": 1.5e11},
    "op_overhead_seconds": 1.0e-6,
    "provenance": "measured",
    "as_of": "2026-11-21",
}


def document(**fields):
    """Return a request document: Llama-3.1-8B on one H100 unless told otherwise."""
    devices = fields.pop("devices", 1)
    device = fields.pop("device", "h100-sxm-80gb")
    base = {
        "model": LLAMA_8B,
        "cluster": {"device": device, "devices_per_node": devices},
        "workload": SERVE,
    }
    return {**base, **fields}


def ask(**fields) -> Estimate:
    return estimate(EstimateRequest.model_validate(document(**fields)))


def search(**fields) -> PlanAnswer:
    return plan(PlanRequest.model_validate(document(**fields)))


def stored_first(estimates, objective, *, dtype="bf16", engine="vllm"):
    """Return sorted estimates, the best that starts the checkpoint as stored in front."""
    if objective in FRUGAL or not serving_engine(engine or "").starts_as_stored:
        return list(estimates)
    own = next((one for one in estimates if one.strategy.weight_dtype == dtype), None)
    return [own, *(one for one in estimates if one is not own)] if own else list(estimates)


def held(estimate_: Estimate, name: str) -> int:
    return estimate_.memory.breakdown_bytes.get(name, 0)
