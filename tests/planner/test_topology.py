"""NVLink domains across nodes, pods and their links: which link a group uses, what it gains."""

import re
from itertools import pairwise

import pytest

from planner.api import plan
from planner.catalog.devices import get_device
from planner.catalog.topologies import list_topologies
from planner.search.suggest import more_devices, other_devices
from planner.specs.base import BadRequestError, UnknownTopologyError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.cluster import resolve_cluster
from planner.workload.resolve import resolve
from planner.workload.topology import (
    exchange_link,
    hand_over_link,
    lies_in_domain,
    link_reasons,
    ring_link,
)
from tests.planner.asking import LLAMA_70B, LLAMA_405B, MIXTRAL, ask

DEEPSEEK = "deepseek-ai/DeepSeek-R1"
RACK = {"device": "gb200-nvl72", "devices_per_node": 4}
DGX = {"device": "h100-sxm-80gb", "devices_per_node": 8}
SERVED = {"kind": "serve", "input_tokens": 2000, "output_tokens": 200, "concurrency": 256}
MADE = {"kind": "generate", "input_tokens": 2000, "output_tokens": 200, "batch_size": 256}
TRAINED = {
    "kind": "train",
    "method": "pretrain",
    "sequence_length": 4096,
    "global_batch_size": 1024,
}
# A workload, a model and a layout over 32 nodes of 4 or 8, each with another kind of group.
LAYOUTS = (
    (SERVED, LLAMA_405B, {"tensor_parallel_size": 16, "data_parallel_size": 8}),
    (MADE, LLAMA_405B, {"tensor_parallel_size": 8, "pipeline_parallel_size": 16}),
    (SERVED, DEEPSEEK, {"data_parallel_size": 64, "expert_parallel_size": 64}),
    (TRAINED, LLAMA_70B, {"tensor_parallel_size": 8, "zero_stage": 3}),
    (TRAINED, LLAMA_70B, {"tensor_parallel_size": 8, "context_parallel_size": 4}),
    (TRAINED, LLAMA_70B, {"tensor_parallel_size": 4, "pipeline_parallel_size": 8}),
    (TRAINED, MIXTRAL, {"expert_parallel_size": 8, "zero_stage": 1}),
    (TRAINED, LLAMA_70B, {"zero_stage": 3, "zero_shard_size": 16, "tensor_parallel_size": 2}),
)
ROUNDING = 1 + 1e-9


def asked(case, **cluster):
    workload, model, strategy = case
    fields = {"engine": "megatron"} if workload is TRAINED else {"engine": "sglang"}
    return ask(
        model=model,
        workload=workload,
        cluster={"nodes": 32, **cluster},
        strategy=strategy,
        **fields,
    )


def seconds(case, **cluster):
    """Return the seconds of a step, or of a request, on a cluster."""
    found = asked(case, **cluster).performance
    return found.step_seconds or found.latency_seconds


def setting(strategy=None, workload=TRAINED, model=LLAMA_70B, **cluster):
    return resolve(
        EstimateRequest.model_validate(
            {
                "model": model,
                "cluster": cluster,
                "workload": workload,
                "strategy": strategy or {},
                "engine": "megatron" if workload is TRAINED else "sglang",
            }
        )
    )


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_domain_of_a_node_is_none_and_a_larger_one_is_never_slower(case):
    alone = asked(case, **RACK).model_dump(exclude={"request", "warnings", "id"})
    same = asked(case, **RACK, nvlink_domain_devices=4)
    assert same.model_dump(exclude={"request", "warnings", "id"}) == alone
    times = [seconds(case, **RACK, nvlink_domain_devices=size) for size in (4, 8, 16, 32, 64, 128)]
    assert all(later <= before * ROUNDING for before, later in pairwise(times)), times
    assert times[-1] < times[0]
    # The rack of 128 is as fast as one node of 128 devices with the same links.
    assert times[-1] == pytest.approx(
        seconds(case, **{**RACK, "devices_per_node": 128, "nodes": 1})
    )


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_ratio_of_one_is_none_and_a_larger_one_never_faster(case):
    for nodes in (1, 4, 16):
        ratios = (1, 2, 7, 64)
        times = [
            seconds(case, **DGX, nodes_per_pod=nodes, oversubscription_ratio=ratio)
            for ratio in ratios
        ]
        assert times[0] == seconds(case, **DGX), nodes
        assert all(later >= before / ROUNDING for before, later in pairwise(times)), times
    whole = seconds(case, **DGX, nodes_per_pod=32, oversubscription_ratio=64)
    assert whole == seconds(case, **DGX), "one pod"


def test_more_nodes_than_a_layout_uses_make_it_no_slower():
    case = (MADE, DEEPSEEK, {"data_parallel_size": 64, "expert_parallel_size": 64})
    times = [seconds(case, **{**RACK, "nodes": n}, nvlink_domain_devices=72) for n in (16, 18, 19)]
    assert times[0] == times[1] == times[2]


def test_unlike_nodes_have_the_smallest_domain_but_a_node_of_the_first_kind():
    rack, dgx = {**RACK, "nodes": 16, "nvlink_domain_devices": 64}, {**DGX, "nodes": 8}
    tray, half = {**RACK, "nodes": 2}, {**rack, "nvlink_domain_devices": 32}
    cases = (
        # groups in order, the domain of all, the widest
        ((rack, dgx), 8, 64),
        ((dgx, rack), 8, 64),
        ((rack, half), 32, 64),
        ((half, rack), 32, 64),
        ((tray, dgx), 4, 8),
        ((dgx, tray), 8, 8),
    )
    for (first, *others), domain, widest in cases:
        cluster = ClusterSpec.model_validate({**first, "other_nodes": others})
        assert (cluster.domain_devices, cluster.widest_domain) == (domain, widest), (first, others)


def test_groups_lie_side_by_side_in_a_domain():
    cases = (
        # devices, domain, ranks of a group, whether all groups lie in one domain
        (144, 72, 8, True),
        (144, 72, 16, False),  # four of the nine groups fit into each
        (128, 72, 16, True),  # 64 of each rack
        (128, 72, 64, True),
        (128, 72, 128, False),
        (72, 72, 72, True),
        (36, 72, 36, True),
        (256, 64, 64, True),
        (16, None, 4, True),
        (16, None, 8, False),
    )
    for devices, domain, ranks, is_inside in cases:
        fields = {**RACK, "nodes": devices // 4, "nvlink_domain_devices": domain}
        own = setting(workload={**TRAINED, "global_batch_size": devices}, **fields)
        assert bool(lies_in_domain(own, ranks)) is is_inside, (devices, domain, ranks)


def test_an_engine_that_reaches_other_nodes_by_sockets_has_no_domain_across_them():
    fields = {**RACK, "nodes": 2, "nvlink_domain_devices": 8}
    request = {"model": LLAMA_70B, "cluster": fields, "workload": SERVED, "strategy": {}}
    for engine, is_inside in (("vllm", True), ("llama_cpp", False)):
        own = resolve(EstimateRequest.model_validate({**request, "engine": engine}))
        assert bool(lies_in_domain(own, 8)) is is_inside, engine


def test_members_of_a_ring_share_what_leaves_a_domain_and_a_pod():
    # 16 nodes of 8: rates of an H100's 450 GB/s and 50 GB/s a port, times the engine's efficiency
    strategy = {"tensor_parallel_size": 4}
    own = setting(strategy, **DGX, nodes=16, nodes_per_pod=4, oversubscription_ratio=8)
    port = own.rates.inter_node_bytes_per_s
    cases = (
        # span, stride, ports that the ring has
        (32, 4, 2),  # within a pod: two members of a node
        (128, 4, 1),  # eight members of a pod share an eighth each
        (128, 32, 1 / 8),  # one member a pod
    )
    for span, stride, ports in cases:
        assert ring_link(own, own.rates, span, stride) == pytest.approx(ports * port), span
    # An all-to-all of 128 sends three quarters of its bytes to other pods.
    assert exchange_link(own, own.rates, 128) == pytest.approx(port / 8 / 0.75)
    assert exchange_link(own, own.rates, 32) == port


def test_groups_lie_side_by_side_in_a_pod():
    cases = (
        # nodes of a pod, ranks of a group, ports of the network that its ring and all-to-all have
        (4, 16, 1, 1),
        (3, 16, 3 / 16, 1 / 8 / 0.5),  # 24 devices: the second group lies in two pods
        (3, 8, 9, 9),  # in a node
    )
    for nodes, ranks, ring, exchange in cases:
        own = setting(**DGX, nodes=16, nodes_per_pod=nodes, oversubscription_ratio=8)
        port, link = own.rates.inter_node_bytes_per_s, own.rates.link_bytes_per_s
        found = ring_link(own, own.rates, ranks, 16), exchange_link(own, own.rates, ranks)
        expected = [min(ports * port, link) if ports < 9 else link for ports in (ring, exchange)]
        assert found == pytest.approx(tuple(expected)), (nodes, ranks)


def test_the_context_ranks_of_a_stage_lie_between_it_and_the_next():
    strategy = {"tensor_parallel_size": 2, "context_parallel_size": 4, "pipeline_parallel_size": 4}
    for domain, is_inside in ((None, True), (16, False), (32, True)):
        # Eight devices of tensor and pipeline ranks fit into a plain node, as in the fitted steps.
        node = DGX if domain is None else {**RACK, "nvlink_domain_devices": domain}
        own = setting(strategy, **node, nodes=64 // node["devices_per_node"])
        found = hand_over_link(own, own.rates) == own.rates.link_bytes_per_s
        assert found is is_inside, domain


def asking(**cluster):
    return PlanRequest.model_validate(
        {"model": LLAMA_70B, "cluster": cluster, "workload": SERVED, "engine": "vllm"}
    )


def test_a_rack_is_offered_more_of_its_trays():
    for domain in (8, 72):
        request = asking(**RACK, nodes=2, nvlink_domain_devices=domain)
        larger = [change.changes["cluster"] for change in more_devices(request)]
        assert [each.nodes for each in larger] == list(range(3, 33)), domain
        assert {(each.devices_per_node, each.nvlink_domain_devices) for each in larger} == {
            (4, domain)
        }


def test_another_device_has_its_own_topology_and_nothing_of_the_first():
    given = {"device": "gb200-nvl72", "devices_per_node": 4, "nodes": 4}
    racks, own_rate = ("gb300-nvl72", 72, None), {"inter_node_bandwidth_bytes_per_second": 1e10}
    cases = (
        ({"topology": "gb200-nvl72"}, {racks, ("a100-sxm4-80gb", None, None)}),
        ({"nvlink_domain_devices": 8, **own_rate}, {("gb300-nvl72", 72, 1e10)}),
        ({}, {("gb300-nvl72", None, None)}),
    )
    for topology, expected in cases:
        found = {
            (
                device.id,
                change.changes["cluster"].nvlink_domain_devices,
                change.changes["cluster"].inter_node_bandwidth_bytes_per_second,
            )
            for device, change in other_devices(asking(**given, **topology))
        }
        assert expected <= found, (topology, found)


def test_a_topology_sets_what_is_not_given():
    for topology in list_topologies():
        device = topology.device or "h100"
        found = resolve_cluster(ClusterSpec(device=device, nodes=4, topology=topology.id))
        for name, value in topology.cluster_fields.items():
            assert getattr(found, name) == value, (topology.id, name)
        assert get_device(device).id == device
        assert topology.source
    own = ClusterSpec(device="gb200-nvl72", topology="gb200-nvl72", nvlink_domain_devices=36)
    assert resolve_cluster(own).nvlink_domain_devices == 36


def test_a_topology_that_cannot_be_is_refused_with_the_way_out():
    cases = (
        ({**RACK, "nodes": 2, "nvlink_domain_devices": 6}, "choose 4"),
        ({**DGX, "oversubscription_ratio": 7.0}, "state it, or leave the ratio out"),
        ({**DGX, "topology": "gb200-nvl72"}, "leave topology out"),
    )
    for fields, words in cases:
        with pytest.raises(BadRequestError, match=words):
            resolve_cluster(ClusterSpec.model_validate(fields))
    odd = {**RACK, "nodes": 2, "nvlink_domain_devices": 6}
    with pytest.raises(BadRequestError, match="choose 4") as raised:
        resolve_cluster(ClusterSpec.model_validate({**DGX, "other_nodes": [odd]}))
    assert raised.value.field == "cluster.other_nodes.0.nvlink_domain_devices"
    with pytest.raises(UnknownTopologyError, match="meta-24k-h100"):
        resolve_cluster(ClusterSpec(device="h100", topology="meta"))


def test_a_plan_says_which_link_its_groups_use_and_searches_groups_across_nodes():
    request = {
        "model": LLAMA_405B,
        "cluster": {**RACK, "nodes": 4, "nvlink_domain_devices": 16},
        "workload": {**SERVED, "concurrency": 4},
        "engine": "vllm",
        "objective": "latency",
    }
    best = plan(PlanRequest.model_validate(request)).plans[0]
    assert best.strategy.tensor_parallel_size > 4, "the groups of a node are 4"
    ranks = best.strategy.tensor_parallel_size
    assert (
        f"tensor-parallel groups of {ranks} use NVLink across {ranks // 4} nodes: they lie in its "
        "domain of 16 devices"
    ) in best.reasons
    work = {**TRAINED, "global_batch_size": 144}
    fields = {**RACK, "nodes": 36, "nvlink_domain_devices": 72}
    named = {"device": "gb200-nvl72", "nodes": 4, "topology": "gb200-nvl72"}
    found = plan(PlanRequest.model_validate({**request, "cluster": named})).plans[0].cluster
    assert (found.devices_per_node, found.device) == (4, "gb200-nvl72"), "exports read them"
    straddling = setting({"tensor_parallel_size": 16}, work, **fields)
    assert "so some lie in two" in next(link_reasons(straddling))
    assert any("nvlink_domain_devices=64" in one for one in straddling.warnings)


def test_the_way_out_of_straddling_groups_is_accepted():
    cases = (
        # tensor, context, domain, nodes, the way out
        (2, 5, 72, 180, 60),  # whole groups of 10 and trays of 4
        (2, 5, 12, 45, None),
        (16, 1, 72, 36, 64),
    )
    for tensor, context, domain, nodes, used in cases:
        strategy = {"tensor_parallel_size": tensor, "context_parallel_size": context}
        work = {**TRAINED, "global_batch_size": 4 * nodes // tensor // context}
        work["sequence_length"] = 4000
        fields = {**RACK, "nodes": nodes, "nvlink_domain_devices": domain}
        said = " ".join(setting(strategy, work, **fields).warnings)
        assert f"choose a size that divides {domain}" in said
        assert ("nvlink_domain_devices=" in said) is bool(used), said
        if used:
            assert f"nvlink_domain_devices={used})" in said
            mended = setting(strategy, work, **{**fields, "nvlink_domain_devices": used})
            assert "lie in two NVLink domains" not in " ".join(mended.warnings)


def test_a_topology_is_recommended_to_engines_that_use_it():
    request = {"model": LLAMA_70B, "cluster": {**RACK, "nodes": 2}, "workload": SERVED}
    for engine, is_named in (("vllm", True), ("llama_cpp", False)):
        own = resolve(EstimateRequest.model_validate({**request, "engine": engine}))
        assert any("topology=gb200-nvl72" in one for one in own.warnings) is is_named, engine


def test_pods_are_named_with_what_they_cost():
    llama = {**DGX, "nodes": 2048, "topology": "meta-24k-h100"}
    steep = {**DGX, "nodes": 8, "nodes_per_pod": 2, "oversubscription_ratio": 100}
    staged = {"tensor_parallel_size": 8, "pipeline_parallel_size": 16}
    experts = {"data_parallel_size": 64, "expert_parallel_size": 64}
    tensor = {"tensor_parallel_size": 8, "data_parallel_size": 8}
    cases = (
        # model, workload, layout, cluster, words
        (LLAMA_405B, TRAINED, staged, llama, ["rings .* not slowed, since 24 members"]),
        (
            LLAMA_405B,
            TRAINED,
            staged,
            {**llama, "oversubscription_ratio": 100},
            ["rings .* slowed to 24% of their bandwidth, since 24 members"],
        ),
        (DEEPSEEK, SERVED, experts, steep, ["all-to-alls of experts .* slowed to 1% of"]),
        (LLAMA_405B, SERVED, tensor, steep, ["no group of ranks crosses pods of 16 devices"]),
        (
            LLAMA_70B,
            TRAINED,
            {"tensor_parallel_size": 4, "context_parallel_size": 8},
            steep,
            ["context exchanges .* slowed to 4%", "rings .* slowed to 1% of their bandwidth$"],
        ),
    )
    for model, work, strategy, fields, words in cases:
        large = {**work, "global_batch_size": 2048} if work is TRAINED else work
        found = list(link_reasons(setting(strategy, large, model, **fields)))
        assert len(found) == len(words), found
        for line, pattern in zip(found, words, strict=True):
            assert re.search(pattern, line), (line, pattern)


# DeepSeek-R1 decoding on 48 GB200 of one NVL72 with experts over all of them, tokens/s a GPU.
# Source: SGLang team, lmsys.org/blog/2025-09-25-gb200-part-2; requests a GPU and context of the
# commands in sgl-project/sglang issue 10903. The planner knows no redundant experts, so it is
# asked with 64 GPUs.
DECODED = (
    # weights, cache, requests a GPU, published
    ("fp8", "bf16", 768, 9087),
    ("nvfp4", "fp8", 1408, 13386),
)


def test_wide_expert_parallelism_in_a_rack_decodes_as_published():
    for weights, cache, requests, published in DECODED:
        case = (
            {"kind": "generate", "input_tokens": 2000, "output_tokens": 100}
            | {"batch_size": 64 * requests},
            DEEPSEEK,
            {"data_parallel_size": 64, "expert_parallel_size": 64}
            | {"weight_dtype": weights, "kv_cache_dtype": cache},
        )
        found = [
            requests
            / ask(
                model=case[1],
                workload=case[0],
                strategy=case[2],
                engine="sglang",
                cluster={**RACK, "nodes": 16, "nvlink_domain_devices": domain},
            ).performance.tpot_seconds
            for domain in (64, None)
        ]
        assert found[0] == pytest.approx(published, rel=0.1), weights
        assert found[1] < found[0] / 4, weights


def test_an_all_reduce_over_two_trays_has_the_bandwidth_of_nvlink():
    """Compare with nccl-tests of 8 GB200 on two nodes: 811 GB/s over NVLink, 85 over InfiniBand.

    Source: Li 2026, "13-gb200-mnnvl-nccl-test" at lixueduan.com.
    """
    for domain, lowest, highest in ((72, 600e9, 811e9), (None, 50e9, 200e9)):
        own = setting(**RACK, nodes=2, nvlink_domain_devices=domain)
        assert lowest < ring_link(own, own.rates, 8, 1) < highest, domain
