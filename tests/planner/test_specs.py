"""The documents: strict, immutable, the same after JSON; what is refused names field and limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from planner.specs.base import BadConfigError, PlannerError, Spec, UnknownDeviceError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import (
    CalibrationFactor,
    EstimateRequest,
    HostCalibration,
    Measurement,
    PlanRequest,
    Quality,
)
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    LatentLayers,
    LayerGroup,
    ModelSpec,
)
from planner.specs.workload import (
    CompressWorkload,
    OffloadSpec,
    ServeWorkload,
    SpeculativeSpec,
    Strategy,
    TrainWorkload,
    Workload,
)
from tests.planner.asking import CPU, SERVE, TRAIN, document


def test_documents_are_strict_immutable_without_what_is_absent_and_the_same_after_json():
    with pytest.raises(ValidationError, match="tensor_parallel"):
        Strategy.model_validate({"tensor_parallel": 2})
    with pytest.raises(ValidationError):
        Strategy().weight_dtype = "bf16"
    assert Strategy(zero_stage=0).model_dump() == {"zero_stage": 0}
    for spec in (EstimateRequest, PlanRequest):
        request = spec.model_validate(document(id="row-1", device=CPU))
        assert spec.model_validate_json(request.model_dump_json()) == request, spec


def test_two_kinds_of_arrival_exclude_each_other_and_the_three_are_named():
    with pytest.raises(ValidationError, match="exclude each other"):
        ServeWorkload.model_validate({**SERVE, "request_rate_per_second": 1.0})
    _, why = refused(ServeWorkload, {**SERVE, "burst_requests": 4})
    for name in ("concurrency", "request_rate_per_second", "burst_requests"):
        assert name in why


def test_a_value_out_of_range_is_refused():
    for field, value in (
        ("zero_stage", 4),
        ("tensor_parallel_size", 0),
        ("sparsity", 1.5),
        ("weight_dtype", "fp12"),
    ):
        with pytest.raises(ValidationError):
            Strategy.model_validate({field: value})


def test_a_device_has_memory_bandwidth_known_peaks_and_no_negative_price():
    with pytest.raises(ValidationError, match="memory_bandwidth_bytes_per_second"):
        DeviceSpec.model_validate({"memory_bytes": 5})

    for name in sorted(DEVICE):
        where, why = refused(DeviceSpec, {**DEVICE, name: 0})
        assert (where, why) == (name, "Input should be greater than 0"), name

    where, why = refused(DeviceSpec, {**DEVICE, "peak_flops_per_second": {"fp12": 1e12}})
    assert where.startswith("peak_flops_per_second.fp12")
    assert "'bf16'" in why

    free = DeviceSpec(**DEVICE, price_usd_per_hour=0)
    where, _ = refused(DeviceSpec, {**DEVICE, "price_usd_per_hour": -0.01})
    assert free.price_usd_per_hour == 0
    assert where == "price_usd_per_hour"


def test_a_cluster_counts_its_devices_and_text_alone_is_an_offer():
    assert ClusterSpec(device="h100", devices_per_node=8, nodes=4).num_devices == 32
    cluster = ClusterSpec.model_validate("aws/p5.48xlarge")
    assert (cluster.instance, cluster.device) == ("aws/p5.48xlarge", "")
    cluster = ClusterSpec.model_validate({"instance": "x", "device": "h100"})
    assert cluster.device == "h100"


def test_a_plan_takes_no_strategy_lists_up_to_a_hundred_and_nothing_measured_is_refused():
    with pytest.raises(ValidationError, match="strategy"):
        PlanRequest.model_validate(document(strategy={}))
    for top in (0, 101):
        assert refused(PlanRequest, document(top=top))[0] == "top", top
    fields = {"metric": "m", "predicted": 1.0, "operator_class": "compute", "host": "h"}
    assert refused(Measurement, {**fields, "measured": 0.0})[0] == "measured"


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


def test_an_error_is_its_message_names_its_field_and_is_a_planner_error():
    error = UnknownDeviceError("no device 'x'", "cluster.device", nearest=("y",))
    assert str(error) == "no device 'x'"
    assert error.to_json() == {
        "code": "unknown_device",
        "message": "no device 'x'",
        "field": "cluster.device",
    }
    assert isinstance(BadConfigError("no"), PlannerError)


SHAPE = {
    "model_type": "demo",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
DEVICE = {"memory_bytes": 2**30, "memory_bandwidth_bytes_per_second": 1e9}
GROUP = TypeAdapter(LayerGroup)


def refused(spec: type[Spec] | TypeAdapter, fields: object) -> tuple[str, str]:
    """Return where a document was refused first and why."""
    validate = spec.validate_python if isinstance(spec, TypeAdapter) else spec.model_validate
    with pytest.raises(ValidationError) as caught:
        validate(fields)
    first = caught.value.errors()[0]
    return ".".join(str(part) for part in first["loc"]), first["msg"]


def test_a_model_needs_every_field_of_its_shape_and_ignores_none():
    for name in sorted(SHAPE):
        fields = {key: value for key, value in SHAPE.items() if key != name}
        assert refused(ModelSpec, fields) == (name, "Field required"), name
    where, why = refused(ModelSpec, {**SHAPE, "num_expert": 8})
    assert where == "num_expert"
    assert "not permitted" in why


def test_layers_heads_experts_and_parts_that_do_not_add_up_are_refused():
    _, why = refused(ModelSpec, {**SHAPE, "attention_layers": [{"count": 3}]})
    assert "attention_layers count 3 layers" in why
    assert "num_hidden_layers is 4" in why

    index = {"kind": "index", "count": 4, "num_heads": 2, "head_dim": 16}
    model = ModelSpec(**SHAPE, attention_layers=[{"count": 4}, index])
    assert [group.kind for group in model.layers_by_attention] == ["full", "index"]

    own = {"count": 4, "num_key_value_heads": 3}
    _, why = refused(ModelSpec, {**SHAPE, "attention_layers": [own]})
    assert "num_attention_heads is 8 and num_key_value_heads is 3" in why
    assert "a multiple" in why

    _, why = refused(ModelSpec, {**SHAPE, "num_experts": 2, "num_experts_per_tok": 3})
    assert "num_experts_per_tok is 3, but num_experts is 2" in why

    where, why = refused(ModelSpec, {**SHAPE, "part_dtypes": {"router": "bf16"}})
    assert where.startswith("part_dtypes.router")
    assert "'attention', 'feed_forward' or 'experts'" in why


def test_a_group_of_layers_has_a_known_kind_and_says_what_it_sees():
    assert GROUP.validate_python({"count": 2}) == AttentionLayers(count=2)

    _, why = refused(GROUP, {"kind": "telepathy", "count": 2})
    assert "telepathy" in why
    assert "'latent'" in why

    for kind in ("sliding", "chunked"):
        _, why = refused(GROUP, {"kind": kind, "count": 2})
        assert f"{kind} layers need a window" in why, kind

    fields = {"count": 1, "num_attention_heads": 1, "head_dim": 8, "split_parameters": 1}
    where, _ = refused(CompressedLayers, {**fields, "replicated_parameters": 1})
    assert where == "window"


def test_a_latent_without_rotary_keys_is_allowed_and_one_without_a_rank_is_not():
    fields = {"count": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    latent = LatentLayers(**fields, qk_rope_head_dim=0)
    assert latent.latent_dim == 32
    assert refused(LatentLayers, {**fields, "qk_rope_head_dim": 8, "kv_lora_rank": 0})[0] == (
        "kv_lora_rank"
    )


@given(per_node=st.integers(1, 1000), nodes=st.integers(1, 1000))
def test_a_cluster_has_its_nodes_times_their_devices(per_node, nodes):
    cluster = ClusterSpec(device="h100", devices_per_node=per_node, nodes=nodes)
    assert cluster.num_devices == per_node * nodes


def test_a_shared_prefix_leaves_something_of_each_prompt():
    for share, is_allowed in ((0.0, True), (0.999, True), (1.0, False)):
        fields = {**SERVE, "prefix_share_ratio": share}
        if is_allowed:
            assert ServeWorkload.model_validate(fields).prefix_share_ratio == share
        else:
            assert refused(ServeWorkload, fields) == (
                "prefix_share_ratio",
                "Input should be less than 1",
            )


def test_shares_and_padding_say_what_of_a_schedule_or_batch_is_text():
    _, why = refused(TrainWorkload, {**TRAIN, "length_schedule": [(512, 0.5), (2048, 0.4)]})
    assert "add up to 0.9, not 1" in why

    _, why = refused(TrainWorkload, {**TRAIN, "length_schedule": [(4096, 1.0)]})
    assert "reaches 4096 tokens" in why
    assert "is 2048" in why

    thirds = [(512, 1 / 3), (1024, 1 / 3), (2048, 1 / 3)]
    workload = TrainWorkload.model_validate({**TRAIN, "length_schedule": thirds})
    assert workload.length_schedule[-1][0] == 2048
    assert workload.text_ratio == 1.0

    workload = TrainWorkload.model_validate({**TRAIN, "padding_ratio": 0.25})
    assert workload.text_ratio == 0.75


def test_numbers_and_kinds_of_work_out_of_their_range_are_refused():
    for bits in (0, 17):
        where, _ = refused(CompressWorkload, {"method": "gptq", "bits": bits})
        assert where == "bits", bits

    _, why = refused(TypeAdapter(Workload), {"kind": "dream"})
    for kind in ("serve", "generate", "train", "compress"):
        assert f"'{kind}'" in why

    for ratio in (-0.1, 1.1):
        assert refused(OffloadSpec, {"weights_cpu": ratio})[0] == "weights_cpu", ratio
        assert refused(SpeculativeSpec, {"draft_model": "x", "acceptance_ratio": ratio})[0] == (
            "acceptance_ratio"
        )

    assert (
        refused(Strategy, {"gradient_compression_ratio": 0.5})[0] == "gradient_compression_ratio"
    )


def test_factors_of_a_host_survive_json_and_a_loss_is_the_expected_share():
    factor = CalibrationFactor(factor=1.25, n=3, spread=0.0)
    host = HostCalibration(host="h", factors={"compute": factor}, digest="d")
    again = HostCalibration.model_validate_json(host.model_dump_json())
    assert again == host
    assert refused(HostCalibration, {"host": "h", "factors": {"magic": factor}})[0].startswith(
        "factors.magic"
    )

    perplexity = Quality(perplexity_ratio=(1.0, 1.25, 2.0))
    score = Quality(score_ratio=(0.5, 0.75, 1.0))
    assert perplexity.loss_ratio == 0.25
    assert score.loss_ratio == 0.25
    assert perplexity.as_score == (0.5, 0.8, 1.0)
    assert Quality().loss_ratio is None
