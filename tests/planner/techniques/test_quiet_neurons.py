"""Weights in host memory that few tokens need, and appliances that the catalog does not know."""

import pytest

from planner.errors import NotCoveredError
from planner.specs.estimate import EstimateRequest
from planner.techniques.registry import Case, get
from planner.workload.resolve import resolve
from tests.planner.asking import GENERATE, TRAIN, ask, document

AWAY = {"weights_cpu": 0.65}


def offloaded(active=None, **workload):
    offload = AWAY if active is None else {**AWAY, "weights_active_ratio": active}
    return ask(
        model="facebook/opt-30b",
        device="rtx-4090",
        engine="llama_cpp",
        workload={**GENERATE, **workload},
        strategy={"weight_dtype": "fp16", "offload": offload},
    )


def test_the_fewer_neurons_speak_the_less_the_host_reads():
    steps = [offloaded(active).performance.tpot_seconds for active in (None, 0.5, 0.1, 0.01)]
    assert steps == sorted(steps, reverse=True)
    assert steps[1] < 0.6 * steps[0]


def test_all_neurons_speaking_is_the_same_as_nothing_said():
    assert offloaded(1.0).performance.tpot_seconds == pytest.approx(
        offloaded().performance.tpot_seconds
    )


def test_many_tokens_together_need_nearly_all_weights():
    one, many = (
        offloaded(0.1, batch_size=batch).performance.tpot_seconds
        / offloaded(batch_size=batch).performance.tpot_seconds
        for batch in (1, 64)
    )

    assert one < 0.2
    assert many > 0.9


def test_what_is_quiet_still_takes_its_memory():
    quiet, loud = offloaded(0.1).memory, offloaded().memory
    assert quiet.host_bytes == loud.host_bytes
    assert quiet.breakdown_bytes == loud.breakdown_bytes


def test_training_reads_all_weights():
    with pytest.raises(NotCoveredError, match="weights_active_ratio"):
        ask(
            workload=TRAIN,
            engine="deepspeed",
            strategy={"offload": {"optimizer": "cpu", "weights_active_ratio": 0.1}},
        )


def case_of(**device):
    given = {
        "kind": "accelerator",
        "memory_bytes": 2**36,
        "memory_bandwidth_bytes_per_second": 4.6e11,
        "peak_flops_per_second": {"fp16": 4.1e11},
        **device,
    }
    setting = resolve(EstimateRequest.model_validate(document(device=given)))
    return Case(setting.model, setting.device, setting.cluster, setting.workload)


def test_an_appliance_is_known_by_its_id():
    assert get("dfx").reason_against(case_of(id="alveo-u280-fpga")) == ""


def test_another_accelerator_is_no_fpga():
    for device in ({"id": "asic"}, {"id": "fpga", "kind": "gpu"}):
        assert "needs an FPGA appliance" in get("dfx").reason_against(case_of(**device)), device
