"""CUDA graphs that an engine captures at its start, inside its share of memory or beside it."""

from planner.cost.activations import captured_graph_bytes
from planner.cost.columns import largest, maximum, minimum, where
from planner.cost.equation import Ledger, Unrecorded
from planner.cost.quantity import Quantity
from planner.specs.workload import ServeWorkload
from planner.workload.largest_step import reserved_requests
from planner.workload.setting import Setting

SMALL_SIZES, STEP, COARSE_STEP = 3, 8, 16
# vllm/distributed/device_communicators/custom_all_reduce.py: not for more than two cards on PCIe.
MOST_ON_PCIE = 2


def graph_bytes(setting: Setting, ledger: Ledger, layers: Quantity) -> float:
    """Return the bytes of the captured graphs of a stage's layers on one device."""
    graphs, device = setting.engine.graphs, setting.device
    if graphs is None or device.kind != "gpu" or not isinstance(setting.workload, ServeWorkload):
        return 0.0
    requests = reserved_requests(setting)
    # Piecewise graphs reach twice the requests, those of decode steps the requests alone.
    sizes = _sizes(minimum(2 * requests, graphs.most_tokens), graphs.coarse_from)
    if graphs.modes > 1:
        sizes = sizes + _sizes(minimum(requests, graphs.most_tokens), graphs.coarse_from)
    each = graphs.bytes_per_layer
    if graphs.collective_bytes_per_layer and (device.link or "PCIe").startswith("PCIe"):
        by_nccl = setting.layout.tensor > MOST_ON_PCIE
        each = where(by_nccl, graphs.collective_bytes_per_layer, each)
    return ledger.term(
        captured_graph_bytes,
        setting.line("memory", "CUDA graphs", key="buffers"),
        num_graphs=sizes,
        num_layers=layers,
        bytes_per_layer=each,
    )


def graph_bytes_outside_budget(setting: Setting) -> float:
    """Return the bytes of the graphs of the largest stage that lie outside the share of memory."""
    graphs = setting.engine.graphs
    if graphs is None or graphs.in_budget:
        return 0.0
    layers = largest(stage.layers for stage in setting.shares)
    return graph_bytes(setting, Unrecorded(), layers)


def _sizes(most: Quantity, coarse_from: int) -> Quantity:
    """Return the number of captured sizes up to ``most`` tokens.

    >>> _sizes(256, 1024), _sizes(512, 1024), _sizes(512, 256)
    (35.0, 67.0, 51.0)
    """
    fine, coarse = minimum(most, coarse_from), maximum(0.0, most - coarse_from)
    return SMALL_SIZES + fine / STEP + coarse / COARSE_STEP
