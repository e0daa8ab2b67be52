"""Laws of hardware: links in bytes, dense peaks, and every device that there is can be used."""

from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.devices import list_devices
from planner.search.question import questions
from planner.search.serving_space import serving_blocks
from planner.specs.estimate import PlanRequest
from tests.planner.asking import LLAMA_70B, TRAIN, ask, document, search
from tests.planner.invariants.drawing import few

# Ports of 1.6 Tbit/s per device exist; a figure beyond 400 GB/s would be bits taken for bytes.
FASTEST_PORT_BYTES_PER_S = 4e11
LINKED = [one for one in list_devices() if one.intra_node_bandwidth_bytes_per_second]


def test_eight_devices_can_be_used_as_eight():
    """GenZ's search stops at TP x PP < devices and never offers an 8-GPU plan."""
    answer = search(model=LLAMA_70B, devices=8, objective="latency", top=100)
    sizes = {plan.strategy.tensor_parallel_size for plan in answer.plans}
    assert 8 in sizes


@few
@given(devices=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
def test_some_layout_uses_every_device(devices):
    """GenZ leaves at least one device idle for every number of them."""
    request = PlanRequest.model_validate(document(model=LLAMA_70B, devices=devices))
    (question,) = questions(request)
    blocks = serving_blocks(question, request.workload)
    sizes = {size for block in blocks for size in block.column(block.setting.layout.devices)}
    assert sizes == {devices}


def test_a_link_is_given_in_bytes():
    """llm-analysis has 400 Gbit/s of an H100's port as 400 GB/s: eight times too much."""
    for device in LINKED:
        link, memory = (
            device.intra_node_bandwidth_bytes_per_second,
            device.memory_bandwidth_bytes_per_second,
        )
        assert 1e9 <= link <= 2e12, device
        assert link < memory or device.kind == "cpu" or "PCIe" in (device.link or ""), device


def test_the_network_between_nodes_is_in_bytes():
    """The same eightfold mistake between nodes would make data parallelism look free."""
    cluster = {"device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 2}
    found = ask(cluster=cluster, workload=TRAIN, engine="megatron")
    used = [
        one.value
        for term in found.terms
        for one in term.inputs
        if one.name.startswith("link bytes")
    ]

    assert used
    assert max(used) <= 9e11
    assert min(used) <= FASTEST_PORT_BYTES_PER_S


def test_a_peak_is_the_dense_one():
    """Public tables list GH200 with 1,979 and B100 with 3,500: peaks of sparse matrices."""
    for device in list_devices():
        peaks = device.peak_flops_per_second
        assert peaks.get("bf16", 0) < 2.6e15, device
        for narrow, wide in (("fp8", "bf16"), ("int8", "bf16")):
            if narrow in peaks and wide in peaks and device.kind == "gpu":
                assert peaks[narrow] <= 4.1 * peaks[wide], device
