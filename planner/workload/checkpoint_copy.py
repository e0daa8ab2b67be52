"""Memory of a background checkpoint: a copy of the written states."""

from planner.cost.columns import Flag, either, where
from planner.cost.dtypes import element_bytes
from planner.cost.equation import Ledger
from planner.cost.training_states import checkpoint_copy_bytes
from planner.specs.workload import TrainWorkload
from planner.workload.ranks import Layout
from planner.workload.setting import Setting
from planner.workload.training_methods import (
    ADAPTER_METHODS,
    state_bytes_each,
    trained_parameters,
)

ON_DEVICE = frozenset({"cpu", "uma"})  # kinds whose memory is the host's own


def is_background(setting: Setting) -> bool:
    """Return whether checkpoints are written in the background.

    By default, Slipway's runner does so only on GPUs. States on disk have no copy in memory.
    """
    default = setting.engine.counted_by_operator and setting.device.runs_cuda
    mode = setting.strategy.checkpoint_writing or ("background" if default else "in_step")
    return mode == "background" and setting.offload.optimizer != "nvme"


def host_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return the host memory of all ranks' copies; 0 if the device memory is host memory."""
    if not is_background(setting) or setting.device.kind in ON_DEVICE:
        return 0.0
    return _copy_bytes(setting, ledger, workload, 1.0)


def device_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return the device memory of the first rank's copy if device memory is host memory."""
    if not is_background(setting) or setting.device.kind not in ON_DEVICE:
        return 0.0
    layout = setting.layout
    return _copy_bytes(
        setting, ledger, workload, where(_is_sharded(layout), 1 / layout.devices, 1.0)
    )


def _copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload, parts: float) -> float:
    adapts = workload.method in ADAPTER_METHODS
    adapter_bytes = element_bytes(setting.engine.adapter_dtype)
    return ledger.term(
        checkpoint_copy_bytes,
        setting.line("memory", "Checkpoint copy in host memory", key="checkpoint_copy"),
        parameters=trained_parameters(setting, workload),
        weight_bytes_per_element=adapter_bytes if adapts else setting.weight_element_bytes,
        state_bytes_per_element=state_bytes_each(setting, workload)
        - setting.engine.extra_state_bytes,
        parts_share=parts,
        gathered_share=where(_is_sharded(setting.layout), 1.0, 0.0),
    )


def _is_sharded(layout: Layout) -> Flag:
    """Return whether states are sharded, so that the first rank gathers them."""
    split = either(layout.devices != layout.data, layout.expert > 1)
    return either(split, layout.zero_stage > 0)
