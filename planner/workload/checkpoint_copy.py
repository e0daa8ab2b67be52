"""What a checkpoint that is written beside the steps takes of memory: a copy of what it writes."""

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


def is_beside(setting: Setting) -> bool:
    """Return whether checkpoints are written beside the steps, as asked or as our runner does.

    Unless told, our runner does so on GPUs alone. States on disk have no copy in memory.
    """
    usual = setting.engine.counted_by_operator and setting.device.runs_cuda
    asked = setting.strategy.checkpoint_writing or ("background" if usual else "in_step")
    return asked == "background" and setting.offload.optimizer != "nvme"


def host_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return what the copies of all ranks take of host memory, apart from the devices'."""
    if not is_beside(setting) or setting.device.kind in ON_DEVICE:
        return 0.0
    return _copied(setting, ledger, workload, 1.0)


def device_copy_bytes(setting: Setting, ledger: Ledger, workload: TrainWorkload) -> float:
    """Return what the first rank's copy takes where the device's memory is the host's."""
    if not is_beside(setting) or setting.device.kind not in ON_DEVICE:
        return 0.0
    layout = setting.layout
    return _copied(setting, ledger, workload, where(_divides(layout), 1 / layout.devices, 1.0))


def _copied(setting: Setting, ledger: Ledger, workload: TrainWorkload, parts: float) -> float:
    adapts = workload.method in ADAPTER_METHODS
    own = element_bytes(setting.engine.adapter_dtype)
    return ledger.term(
        checkpoint_copy_bytes,
        setting.line("memory", "Copy of a checkpoint beside the steps", key="checkpoint_copy"),
        parameters=trained_parameters(setting, workload),
        weight_bytes_per_element=own if adapts else setting.weight_element_bytes,
        state_bytes_per_element=state_bytes_each(setting, workload)
        - setting.engine.extra_state_bytes,
        parts_share=parts,
        gathered_share=where(_divides(setting.layout), 1.0, 0.0),
    )


def _divides(layout: Layout) -> Flag:
    """Return whether ranks hold parts of the states, which the first one gathers."""
    split = either(layout.devices != layout.data, layout.expert > 1)
    return either(split, layout.zero_stage > 0)
