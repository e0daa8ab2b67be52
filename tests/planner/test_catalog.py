"""The catalogs: models, devices, engines and offers, by which names, and what is refused."""

import json

import pytest

from planner.api import estimate, plan
from planner.catalog.devices import (
    DriverDevice,
    MeasuredRates,
    device_of_driver,
    device_slug,
    get_device,
    get_instance,
    host_device,
    list_devices,
    list_instances,
    offers_for,
    price_of,
)
from planner.catalog.engines import generic_engines, get_engine, list_engines
from planner.catalog.models import get_model, list_models
from planner.specs.base import (
    BadRequestError,
    UnknownDeviceError,
    UnknownInstanceError,
    UnknownModelError,
)
from planner.specs.estimate import EstimateRequest, PlanAnswer, PlanRequest
from tests.planner.asking import LLAMA_8B, SERVE, ask, document


def test_the_catalog_begins_with_llama_and_is_large():
    assert len(list_models()) >= 40
    assert len(list_devices()) >= 100
    assert [entry.id for entry in list_models()[:3]] == [
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-405B",
    ]


def test_an_entry_is_found_by_its_usual_spellings():
    # A model is found by alias and in any case.
    for name in ["meta-llama/Llama-3.1-8B-Instruct", "META-LLAMA/llama-3.1-8b-instruct"]:
        assert get_model(name).id == "meta-llama/Llama-3.1-8B-Instruct"

    # A device is found by its usual spellings.
    for name, device_id in [
        ("H100-SXM5-80GB", "h100-sxm5-80gb"),
        ("h100-sxm-80gb", "h100-sxm5-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("m2-max", "apple-m2-max"),
        ("A100", "a100-sxm4-80gb"),
    ]:
        assert get_device(name).id == device_id

    # A slug has one hyphen for every run of other characters.
    assert device_slug("  A100 (SXM4) 80GB ") == "a100-sxm4-80gb"


def test_an_unknown_entry_is_refused_with_the_nearest_names():
    with pytest.raises(UnknownModelError) as caught:
        get_model("meta-llama/Llama-3.1-9B")
    assert "meta-llama/llama-3.1-8b" in [name.lower() for name in caught.value.nearest]

    # A name that begins with a known one names that first.
    with pytest.raises(UnknownModelError) as caught:
        get_model("Qwen/Qwen3-8B-of-mine")
    assert caught.value.nearest[0] == "Qwen/Qwen3-8B"
    with pytest.raises(UnknownDeviceError, match="nearest: h100") as caught:
        get_device("h1000")
    assert caught.value.field == "cluster.device"


def test_every_device_and_every_model_says_where_its_figures_are_from():
    told = [*list_devices(), *(get_model(entry.id) for entry in list_models())]
    wrong = [
        (each.id, each.source, each.as_of) for each in told if not each.source or not each.as_of
    ]
    assert not wrong, wrong


def test_figures_of_devices_are_dense_in_bytes_and_below_their_peaks():
    # Peaks are dense.
    peaks = get_device("h100").peak_flops_per_second
    assert peaks["bf16"] == 9.89e14
    assert peaks["fp8"] == 1.979e15
    # Links are in bytes not bits.
    assert get_device("h100").intra_node_bandwidth_bytes_per_second == 450e9
    # What a matrix product reaches is below the peak.
    for device in list_devices():
        for dtype, reached in device.achieved_flops_per_second.items():
            assert reached <= device.peak_flops_per_second[dtype], device.id


def test_every_engine_has_figures_on_every_kind_of_device():
    found = {
        (key, kind): get_engine(key, kind).matmul_efficiency
        for key in (*list_engines(), *generic_engines(), "never-heard-of")
        for kind in ("gpu", "cpu", "uma", "accelerator")
    }
    wrong = {pair: share for pair, share in found.items() if not 0 < share <= 1}
    assert not wrong, wrong

    # An engine without figures of its own is marked.
    assert get_engine("never-heard-of", "gpu").is_generic
    for name, meant in (("vlm", "vllm"), ("sglan", "sglang"), ("llamacp", "llama.*cpp")):
        with pytest.raises(BadRequestError, match=rf"engine .* is unknown \(nearest: {meant}\)"):
            get_engine(name, "gpu")
    assert not get_engine("vllm", "gpu").is_generic


def test_a_server_of_more_devices_than_any_in_the_catalog_is_told():
    for device, inside, told in (
        ("h100-sxm", 16, True),
        ("h100-sxm", 8, False),
        ("a100-40gb", 16, False),  # gcp/a2-megagpu-16g
        ("gb200-nvl72", 16, False),
    ):
        warnings = ask(device=device, devices=inside).warnings
        assert any("2x8xh100" in warning for warning in warnings) is told, (device, inside)


def test_a_price_comes_with_its_offers_where_anybody_rents_the_device_out():
    device = get_device("h100-sxm-80gb")
    assert 1 < device.price_usd_per_hour < 10
    assert "on-demand offers" in device.price_source
    assert "2026-" in device.price_source

    # A device that nobody rents out has no price.
    assert get_device("m2-max").price_usd_per_hour is None


EIGHT_H100 = "aws/p5.48xlarge"
ONE_H100 = "nebius/gpu-h100-sxm_1gpu-16vcpu-200gb"


def test_there_are_three_hundred_offers_of_many_providers():
    offers = list_instances()
    assert len(offers) >= 300
    assert len({offer.provider for offer in offers}) >= 20
    assert len({offer.id for offer in offers}) == len(offers)


def test_every_offer_has_a_price_a_day_a_source_and_a_device_that_is_known():
    wrong = [
        offer
        for offer in list_instances()
        if offer.price_usd_per_hour
        != pytest.approx(offer.price_usd_per_device_hour * offer.devices)
        or not offer.as_of.startswith("20")
        or not offer.source
        or (offer.device is not None and get_device(offer.device).id != offer.device)
    ]
    assert not wrong, wrong


def test_an_offer_is_found_by_its_type_or_refused_with_the_nearest():
    assert get_instance("P5.48xlarge").id == EIGHT_H100
    assert get_instance(EIGHT_H100).devices == 8

    with pytest.raises(UnknownInstanceError, match=r"nearest: .*aws/p5.48xlarge") as caught:
        get_instance("aws/p5.48xlarg")
    assert caught.value.field == "cluster.instance"
    # An offer of a card that the catalog lacks says so.
    unknown = next(offer.id for offer in list_instances() if offer.device is None)
    with pytest.raises(BadRequestError, match="the device catalog does not have"):
        ask(cluster=unknown)
    # A cluster without device or offer is refused by name.
    with pytest.raises(ValueError, match=r"cluster\.device"):
        PlanRequest.model_validate(json.loads(json.dumps(document(cluster={"nodes": 2}))))


def test_offers_of_a_device_come_cheapest_first_and_bound_its_price():
    # Offers of a device come cheapest first and firm unless asked.
    firm = [offer.price_usd_per_device_hour for offer in offers_for("h100-sxm5-80gb")]
    every = offers_for("h100-sxm5-80gb", spot=True)
    assert firm == sorted(firm)
    assert len(every) > len(firm)
    assert not any(offer.is_spot for offer in offers_for("h100-sxm5-80gb"))

    # The price of a device lies among its offers.
    wrong = []
    for device in (each for each in list_devices() if each.price_usd_per_hour):
        prices = [offer.price_usd_per_device_hour for offer in offers_for(device.id)]
        inside = min(prices) <= device.price_usd_per_hour <= max(prices) + 1e-6
        if not inside or device.price_source != price_of(device.id)["price_source"]:
            wrong.append((device.id, device.price_usd_per_hour, prices, device.price_source))
    assert not wrong, wrong

    # A device that is only auctioned has no price.
    only_spot = {o.device for o in list_instances() if o.is_spot and o.device} - {
        o.device for o in list_instances() if not o.is_spot
    }
    assert only_spot
    assert all(get_device(name).price_usd_per_hour is None for name in only_spot)


def test_a_cluster_may_be_nothing_but_an_offer_and_all_of_it_is_paid():
    found = ask(cluster=EIGHT_H100, engine="vllm")
    same = ask(devices=8, device="h100-sxm5-80gb", engine="vllm")
    assert found.performance == same.performance
    assert found.memory == same.memory

    # The cost is the price of the offer and names it.
    found = ask(cluster=ONE_H100, engine="vllm")
    offer = get_instance(ONE_H100)
    rate = found.performance.tokens_per_second
    term = next(term for term in found.terms if term.name == "Cost per million tokens")
    assert found.cost_usd_per_million_tokens == pytest.approx(
        offer.price_usd_per_hour / 3600 / rate * 1e6
    )
    assert offer.id in term.source
    assert offer.as_of in term.source

    # All devices of an offer are paid for used or not.
    strategy = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    whole = ask(cluster=EIGHT_H100, engine="vllm", strategy=strategy)
    term = next(term for term in whole.terms if term.name == "Cost per million tokens")
    assert {i.symbol: i.value for i in term.inputs}["n"] == 8

    # Several nodes of an offer are several machines.
    request = EstimateRequest.model_validate(
        document(cluster={"instance": EIGHT_H100, "nodes": 2}, engine="vllm")
    )
    strategy = estimate(request).strategy
    assert strategy.data_parallel_size * strategy.tensor_parallel_size == 16


def test_hardware_is_chosen_among_offers_by_cost():
    names = [EIGHT_H100, ONE_H100, "runpod/l4-community"]
    answer = plan(
        PlanRequest.model_validate(
            document(
                cluster=names[0],
                hardware_options=names,
                objective="cost",
                engine="vllm",
                workload={**SERVE, "concurrency": 64},
            )
        )
    )
    costs = {p.cluster.instance: p.cost_usd_per_million_tokens for p in reversed(answer.plans)}

    assert answer.plans[0].cluster.instance == min(costs, key=costs.get)
    assert answer.plans[0].cluster.device == get_device("h100").id


def test_a_plan_on_an_offer_can_be_sent_back_as_json():
    request = PlanRequest.model_validate(document(cluster=ONE_H100, engine="vllm"))
    answer = PlanAnswer.model_validate_json(plan(request).model_dump_json())
    again = estimate(
        EstimateRequest(
            model=LLAMA_8B,
            cluster=answer.plans[0].cluster,
            workload=request.workload,
            strategy=answer.plans[0].strategy,
            engine="vllm",
        )
    )
    assert again.cost_usd_per_million_tokens == answer.plans[0].cost_usd_per_million_tokens


RATES = MeasuredRates(
    1e12, {"bf16": 5e14}, "measured on Lab", host_to_device_bytes_per_second=2e10
)
H100 = DriverDevice("NVIDIA H100 80GB HBM3", "gpu", 85_000_000_000)


def test_measured_rates_replace_those_of_the_datasheet_and_leave_the_others():
    datasheet, measured = host_device(H100, RATES)
    published = get_device("h100-sxm5-80gb")
    assert datasheet == published.model_copy(update={"memory_bytes": H100.memory_bytes})
    assert measured.memory_bandwidth_bytes_per_second == 1e12
    assert measured.peak_flops_per_second == {**published.peak_flops_per_second, "bf16": 5e14}
    assert measured.host_to_device_bandwidth_bytes_per_second == 2e10
    assert (measured.provenance, measured.source) == ("measured", "measured on Lab")
    assert (measured.id, measured.memory_bytes) == (published.id, H100.memory_bytes)
    assert host_device(H100, None).measured is None

    # Unified memory stays as published.
    spark = DriverDevice("NVIDIA GB10", "gpu", 121 * 2**30)
    assert host_device(spark, None).datasheet == get_device("gb10-dgx-spark")


def test_a_device_without_a_datasheet_is_what_was_measured():
    for device in [
        DriverDevice("AMD EPYC", "cpu", 2**34),
        DriverDevice("Homemade 9000", "gpu", 2**34),
        DriverDevice("AMD Instinct MI300X", "gpu", 2**34, is_partition=True),
    ]:
        datasheet, measured = host_device(device, RATES, device_id="host-lab")
        assert datasheet is None
        assert (measured.id, measured.name, measured.kind) == (
            "host-lab",
            device.name,
            device.kind,
        )
        assert (measured.memory_bytes, measured.peak_flops_per_second) == (2**34, {"bf16": 5e14})


def test_an_instance_has_its_part_of_memory_bandwidth_and_multiprocessors():
    for name, gpu, memory, compute in [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-sxm4-80gb", 4 / 8, 42 / 108),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", "a100-sxm4-40gb", 1 / 8, 14 / 108),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", "a100-sxm4-40gb", 1.0, 98 / 108),
        ("H100 80GB HBM3 MIG 1g.10gb", "h100-sxm5-80gb", 1 / 8, 16 / 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", "h100-sxm5-80gb", 2 / 8, 26 / 132),
        ("NVIDIA H200 MIG 3g.71gb", "h200-sxm-141gb", 4 / 8, 60 / 132),
        ("NVIDIA B200 MIG 1g.23gb", "b200-sxm", 1 / 8, 1 / 7),
        ("NVIDIA A30 MIG 2g.12gb", "a30", 2 / 4, 2 / 4),
    ]:
        whole, instance = get_device(gpu), device_of_driver(name)
        assert instance.memory_bytes == int(whole.memory_bytes * memory)
        assert instance.memory_bandwidth_bytes_per_second == pytest.approx(
            whole.memory_bandwidth_bytes_per_second * memory
        )
        for dtype, rate in whole.peak_flops_per_second.items():
            assert instance.peak_flops_per_second[dtype] == pytest.approx(rate * compute)
        assert (instance.provenance, "MIG User Guide" in instance.source) == ("published", True)
        assert (instance.tdp_watts, instance.price_usd_per_hour, instance.link) == (
            None,
            None,
            None,
        )
        assert instance.architecture == whole.architecture


def test_an_instance_that_no_gpu_has_is_unknown():
    for name in [
        "NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb",  # a part of an instance
        "NVIDIA A100-SXM4-80GB MIG 5g.40gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.20gb",  # of an A100 with 40 GB
        "NVIDIA L4 MIG 1g.3gb",  # without MIG
        "Homemade 9000 MIG 1g.10gb",
    ]:
        assert device_of_driver(name) is None
