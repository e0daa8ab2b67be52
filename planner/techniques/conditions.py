"""Conditions of techniques; a failed condition gives a reason with the case's numbers.

The reason is an empty string if the condition holds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from planner.specs.base import Dtype
from planner.specs.workload import ServeWorkload, TrainWorkload
from planner.techniques.case import Case

ADAPTERS = frozenset({"lora", "qlora"})
LEAST_LAYERS = 2


@dataclass(frozen=True)
class Condition:
    """A condition in words, and the function that returns why a case fails it."""

    words: str
    reason_against: Callable[[Case], str]


def _several_devices(case: Case) -> str:
    if case.cluster.num_devices > 1:
        return ""
    return "needs at least 2 devices: this cluster has 1"


def _several_nodes(case: Case) -> str:
    return "" if case.cluster.num_nodes > 1 else "needs at least 2 nodes: this cluster has 1"


def _unlike_nodes(case: Case) -> str:
    if case.cluster.other_nodes:
        return ""
    return f"needs nodes of another kind: this cluster has {case.device.id} alone"


def _sparse_model(case: Case) -> str:
    if case.model.is_moe:
        return ""
    return "needs a sparse mixture-of-experts model: this one is dense"


def _plain_mlp(case: Case) -> str:
    if not case.model.gated_mlp:
        return ""
    return "needs ReLU feed-forward blocks, whose zeros can be foreseen: this model's are gated"


def _divisible_heads(case: Case) -> str:
    heads, devices = case.model.num_attention_heads, case.cluster.widest_node
    if any(heads % size == 0 for size in range(2, devices + 1)):
        return ""
    return (
        f"needs a divisor of the {heads} attention heads between 2 and the {devices} devices "
        "of a node"
    )


def _several_layers(case: Case) -> str:
    layers = case.model.num_hidden_layers
    return "" if layers >= LEAST_LAYERS else f"needs a layer per stage: this model has {layers}"


def _several_sequences(case: Case) -> str:
    workload = case.workload
    if isinstance(workload, TrainWorkload) and workload.global_batch_size == 1:
        return "needs at least 2 sequences per step, one per data-parallel rank: there is 1"
    return ""


def _requests(case: Case) -> str:
    return "" if isinstance(case.workload, ServeWorkload) else "needs requests that come and go"


def _accelerator(case: Case) -> str:
    if case.device.kind != "cpu":
        return ""
    return "needs a device beside the host's processor: this one is the host"


def _adapters(case: Case) -> str:
    method = getattr(case.workload, "method", "")
    return "" if method in ADAPTERS else f"needs adapters over a frozen base: this is {method}"


def _all_weights(case: Case) -> str:
    method = getattr(case.workload, "method", "")
    if method not in ADAPTERS:
        return ""
    return f"needs all weights trained: {method} trains adapters over a frozen base"


def _pretraining(case: Case) -> str:
    method = getattr(case.workload, "method", "")
    return "" if method == "pretrain" else f"needs training from scratch: this is {method}"


def _fpga(case: Case) -> str:
    device = case.device
    if device.kind == "accelerator" and "fpga" in f"{device.id} {device.name}".lower():
        return ""
    return (
        f"needs an FPGA appliance: {device.id} is a {device.kind}; give the appliance's own "
        "memory, bandwidth and peaks as the device, with FPGA in its id, to ask what it would do"
    )


def _peak(dtype: Dtype) -> Condition:
    def reason(case: Case) -> str:
        if dtype in case.device.peak_flops_per_second:
            return ""
        needs = f"needs {dtype} matrix units: {case.device.id} has none"
        if case.model.weight_dtype == dtype:
            return f"{needs}; an engine that takes this checkpoint multiplies it in 16 bits"
        return needs

    return Condition(f"the device multiplies matrices in {dtype}", reason)


def _price(case: Case) -> str:
    if case.device.price_usd_per_hour is not None:
        return ""
    return f"needs an hourly price: the catalog has none for {case.device.id}"


def _power(case: Case) -> str:
    if case.device.tdp_watts is not None:
        return ""
    return f"needs a power rating: the catalog has none for {case.device.id}"


CONDITIONS: dict[str, Condition] = {
    "several_devices": Condition("the cluster has at least 2 devices", _several_devices),
    "several_nodes": Condition("the cluster has at least 2 nodes", _several_nodes),
    "unlike_nodes": Condition("the cluster has nodes of several kinds", _unlike_nodes),
    "sparse_model": Condition("the model is a sparse mixture of experts", _sparse_model),
    "plain_mlp": Condition("the feed-forward blocks are plain, not gated", _plain_mlp),
    "divisible_heads": Condition(
        "a number of devices in one node divides the attention heads", _divisible_heads
    ),
    "several_layers": Condition("there is a layer for each stage", _several_layers),
    "several_sequences": Condition("a step has at least 2 sequences", _several_sequences),
    "requests": Condition("requests come and go", _requests),
    "accelerator": Condition("the device is not the host's own processor", _accelerator),
    "adapters": Condition("adapters are trained over a frozen base", _adapters),
    "all_weights": Condition("all weights are trained", _all_weights),
    "pretraining": Condition("the model is trained from scratch", _pretraining),
    "fpga": Condition("the device is an FPGA appliance", _fpga),
    "peak_fp8": _peak("fp8"),
    "peak_int8": _peak("int8"),
    "peak_nvfp4": _peak("nvfp4"),
    "price": Condition("the device has an hourly price", _price),
    "power": Condition("the device has a power rating", _power),
}
