"""The documents: strict, immutable, the same after JSON, absent instead of null."""

import pytest
from pydantic import ValidationError

from planner.errors import BadConfigError, PlannerError, UnknownDeviceError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.workload import ServeWorkload, Strategy
from tests.planner.asking import CPU, SERVE, document


def test_an_unknown_field_is_refused():
    with pytest.raises(ValidationError, match="tensor_parallel"):
        Strategy.model_validate({"tensor_parallel": 2})


def test_a_document_cannot_be_changed():
    with pytest.raises(ValidationError):
        Strategy().weight_dtype = "bf16"


def test_what_is_absent_is_left_out_of_the_json():
    assert Strategy(zero_stage=0).model_dump() == {"zero_stage": 0}


@pytest.mark.parametrize("spec", [EstimateRequest, PlanRequest])
def test_a_request_survives_json(spec):
    request = spec.model_validate(document(id="row-1", device=CPU))

    assert spec.model_validate_json(request.model_dump_json()) == request


def test_two_kinds_of_arrival_exclude_each_other():
    with pytest.raises(ValidationError, match="exclude each other"):
        ServeWorkload.model_validate({**SERVE, "request_rate_per_second": 1.0})


@pytest.mark.parametrize(
    ("field", "value"),
    [("zero_stage", 4), ("tensor_parallel_size", 0), ("sparsity", 1.5), ("weight_dtype", "fp12")],
)
def test_a_value_out_of_range_is_refused(field, value):
    with pytest.raises(ValidationError):
        Strategy.model_validate({field: value})


def test_a_device_needs_memory_and_bandwidth():
    with pytest.raises(ValidationError, match="memory_bandwidth_bytes_per_second"):
        DeviceSpec.model_validate({"memory_bytes": 5})


def test_a_cluster_counts_its_devices():
    assert ClusterSpec(device="h100", devices_per_node=8, nodes=4).num_devices == 32


def test_a_plan_request_takes_no_strategy():
    with pytest.raises(ValidationError, match="strategy"):
        PlanRequest.model_validate(document(strategy={}))


def test_a_full_request_of_the_contract_is_read():
    request = EstimateRequest.model_validate(
        {
            "id": "row-17",
            "model": "meta-llama/Llama-3.1-70B",
            "cluster": {"device": "h100-sxm-80gb", "devices_per_node": 8, "nodes": 1},
            "workload": {**SERVE, "input_tokens": 2048, "output_tokens": 128},
            "strategy": {"weight_dtype": "fp8", "activation_dtype": "fp8"},
            "engine": "tensorrt_llm",
        }
    )

    assert request.cluster.device == "h100-sxm-80gb"


def test_an_error_is_its_message_and_its_json_names_the_field():
    error = UnknownDeviceError("no device 'x'", "cluster.device", nearest=("y",))

    assert str(error) == "no device 'x'"
    assert error.to_json() == {
        "code": "unknown_device",
        "message": "no device 'x'",
        "field": "cluster.device",
    }


def test_every_error_is_a_planner_error():
    assert isinstance(BadConfigError("no"), PlannerError)
