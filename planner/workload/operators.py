"""Common parts of the operators of one forward pass: work, rates and ledger."""

from dataclasses import dataclass, replace

import numpy as np

from planner.cost.quantity import Flag, Ledger, Line, PerLayerGroup, is_column, maximum, where
from planner.cost.roofline import matmul_flops, power_wait_seconds, roofline_seconds
from planner.cost.weights import GEMM_SPEEDUP
from planner.specs.base import OperatorClass
from planner.workload.setting import Rates, Setting

# 16-bit FLOP per joule of a GPU's power limit before fitting: 71 TFLOP/s of
# an RTX 3090's 350 W to 174 of an H100 PCIe's (llama.cpp, 2024).
FLOPS_PER_JOULE = 0.35e12
ROUNDS_IN_A_NODE = 3  # eight ranks
# Operators whose weights pruning makes sparse: the output head stays dense.
PRUNED = frozenset({"linear", "experts"})


NOTHING = PerLayerGroup(())


@dataclass(frozen=True)
class ForwardPass:
    """The work of one forward pass on one device.

    Data-parallel attention and context parallelism split it over ranks; ``routed_tokens`` counts
    all ranks. A chunked prompt reads the weights in several ``steps``.
    """

    group: str
    sequences: float
    new_tokens: float
    token_pairs: PerLayerGroup
    read_layer_tokens: PerLayerGroup
    sampled_tokens: float
    routed_tokens: float
    steps: float = 1.0
    # Micro-batches per load of streamed weights, cached tokens of one of them on any tier, and the
    # tokens that this pass stores.
    batches: float = 1.0
    cached_layer_tokens: PerLayerGroup = NOTHING
    stored_layer_tokens: PerLayerGroup = NOTHING
    # Pairs of query and cached token that the host attends to instead of the device.
    host_token_pairs: PerLayerGroup = NOTHING
    # Whether queries attend to cached latents without decompressing them.
    absorbed: bool = False


@dataclass(frozen=True)
class OperatorCost:
    """The seconds of one operator class in a pass, whether arithmetic bounds it, and its work."""

    seconds: float
    is_compute: Flag = False
    flops: float = 0.0
    moved_bytes: float = 0.0


@dataclass(frozen=True)
class Operation:
    """One pass of a setting, which costs and records its operators."""

    setting: Setting
    rates: Rates
    ledger: Ledger
    work: ForwardPass

    def line(self, name: str, part: str, operator_class: OperatorClass, key: str = "") -> Line:
        """Return the ledger line of a term, with its published serving factor."""
        return self.setting.part_line(self.work.group, name, part, operator_class, key)

    def matmul(
        self, name: str, key: str, parameters: float, tokens: float, moved_bytes: float
    ) -> OperatorCost:
        """Return the cost of products of ``tokens`` tokens with weights that are read once."""
        flops = self.ledger.term(
            matmul_flops,
            self.setting.line(self.work.group, f"{name}: arithmetic", key=f"{key}_flops"),
            parameters=parameters,
            num_tokens=tokens,
        )
        products = self.roofline((name, "linear", key), flops, moved_bytes)
        return self._power_limited(products, name, key)

    def _power_limited(self, products: OperatorCost, name: str, key: str) -> OperatorCost:
        """Return matrix products slowed by the GPU's power limit, if that was fitted."""
        seconds_ratio = self.setting.power_factor(self.work.group)
        watts = self.setting.device.tdp_watts
        if not seconds_ratio or not watts:
            return products
        title = f"{name}, held back by the power limit"
        wait = self.ledger.term(
            power_wait_seconds,
            self.setting.line(self.work.group, title, "compute", f"{key}_power"),
            work_flops=products.flops,
            power_watts=watts,
            flops_per_joule=FLOPS_PER_JOULE / seconds_ratio,
            products_s=products.seconds,
        )
        return replace(products, seconds=products.seconds + wait)

    def roofline(
        self, names: tuple[str, str, str], flops: float, moved_bytes: float
    ) -> OperatorCost:
        """Return the cost of one operator by the roofline; ``names``: title, part, key."""
        rates = self.rates
        of_cache = names[1] == "attention"
        peak = rates.peak_flops_per_s
        if self.setting.skips_zeros and names[2] in PRUNED:
            peak *= GEMM_SPEEDUP
        efficiency = rates.kv_efficiency if of_cache else rates.weight_efficiency
        compute = flops / (peak * rates.compute_efficiency)
        memory = moved_bytes / (rates.memory_bytes_per_s * efficiency)
        is_compute: Flag = compute >= memory
        seconds = self.ledger.term(
            roofline_seconds,
            self._bound_line(names, is_compute),
            work_flops=flops,
            peak_flops_per_s=peak,
            compute_efficiency=rates.compute_efficiency,
            moved_bytes=moved_bytes,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            memory_efficiency=efficiency,
        )
        return OperatorCost(seconds, is_compute, flops, moved_bytes)

    def _bound_line(self, names: tuple[str, str, str], is_compute: Flag) -> Line:
        """Return the ledger line of an operator, with the host's factor for its bound."""
        name, part, key = names
        if not is_column(is_compute):
            return self.line(name, part, "compute" if is_compute else "memory_bandwidth", key)
        computing = self.line(name, part, "compute", key)
        reading = self.line(name, part, "memory_bandwidth", key)
        factor = where(is_compute, computing.factor, reading.factor)
        return Line(reading.group, name, key, reading.operator_class, factor, reading.origin)


def latency_for(rates: Rates, ranks: float) -> float:
    """Return the latency of a collective, proportional to log2 of the ranks.

    Source: Thakur et al. 2005, optimisation of collective communication in MPICH (recursive
    doubling for short messages); the engine's latency is for a node of eight.
    """
    rounds: float = np.log2(maximum(ranks, 1))
    return rates.latency_s * rounds / ROUNDS_IN_A_NODE
