"""What things are called and cost, tiers of deployment, and rules of thumb held to a plan."""

import csv
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.devices import (
    device_slug,
    get_device,
    get_instance,
    list_devices,
    list_instances,
    offers_for,
    price_of,
)
from planner.catalog.models import get_model, list_models
from planner.catalog.reading import nearest_names
from planner.cost.roofline import (
    drawn_watts,
    joules_per_token,
    of_electricity,
    run_joules,
    run_usd,
    usd_per_million_tokens,
)
from planner.search.rank import RULES
from planner.specs.base import UnknownDeviceError, UnknownInstanceError
from planner.specs.cluster import DeviceSpec
from planner.techniques.registry import TECHNIQUES
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, LLAMA_405B, TRAIN, search

OFFERS = Path("planner/catalog/data/instances.csv")
ROWS = list(csv.DictReader(OFFERS.read_text(encoding="utf-8").splitlines()))


def rented(device: str, year: str) -> list[float]:
    """Return what one device costs an hour in each firm offer of a year, read from the file."""
    return [
        float(row["usd_per_hour"]) / int(row["devices"])
        for row in ROWS
        if row["device"] == device and row["spot"] != "yes" and row["as_of"].startswith(year)
    ]


def test_a_devices_price_is_the_median_of_the_newest_firm_offers_alone():
    for device in ("rtx-4090", "h100-sxm5-80gb", "l4", "mi300x"):
        newest = max(r["as_of"][:4] for r in ROWS if r["device"] == device and r["spot"] != "yes")
        found = price_of(device)["price_usd_per_hour"]
        assert found == pytest.approx(statistics.median(rented(device, newest)), abs=1e-6), device

    old = get_instance("aws/p5.48xlarge")
    found = price_of("h100-sxm5-80gb")
    assert old.as_of.startswith("2025")
    assert old.price_usd_per_device_hour == pytest.approx(98.32 / 8)
    assert "aws" not in found["price_source"]


def test_an_offer_says_provider_collector_and_day_and_what_is_a_spot_price():
    words = price_of("rtx-4090")["price_source"]
    providers = words.partition(" offers of ")[2].partition(", collected by")[0].split(", ")
    assert providers == sorted(set(providers))
    assert "runpod" in providers
    assert words.endswith("2026-05-24")

    offer = get_instance("runpod/rtx-4090-community")
    assert offer.price_source == (
        "community price of runpod/rtx-4090-community, tardellirs/gpu-pricing "
        "src/data/offerings.json (MIT), citing www.runpod.io, 2026-05-24"
    )

    offer = next(one for one in list_instances() if one.is_spot)
    assert offer.price_source.startswith(f"spot price of {offer.id}")


def test_an_offer_is_taken_by_its_full_name_or_one_is_told_how_to_give_ones_own():
    types = [offer.id.split("/", 1)[1] for offer in list_instances()]
    shared = next(name for name in types if types.count(name) > 1)
    with pytest.raises(UnknownInstanceError, match="nearest: ") as caught:
        get_instance(shared)
    assert any(name.endswith(shared) for name in caught.value.nearest)
    assert get_instance("  AWS/P5.48xlarge ") == get_instance("aws/p5.48xlarge")

    with pytest.raises(UnknownInstanceError) as caught:
        get_instance("")
    assert caught.value.nearest == ()
    assert "nearest: none" in caught.value.message
    assert "price_usd_per_hour" in caught.value.message


def test_a_device_of_no_catalog_is_told_what_describes_it_and_has_no_offers():
    with pytest.raises(UnknownDeviceError, match="nearest: none") as caught:
        get_device("zzzz")
    for name in ("memory_bytes", "memory_bandwidth_bytes_per_second", "peak_flops_per_second"):
        assert name in caught.value.message
    assert offers_for("never-built", spot=True) == ()
    assert price_of("never-built") == {}


def test_a_device_has_the_bandwidth_and_the_dense_peaks_of_its_data_sheet():
    """NVIDIA's and AMD's data sheets; figures with sparsity are halved."""
    for name, bytes_per_second, flops in (
        ("v100-sxm2-32gb", 900e9, {"fp16": 125e12}),
        ("t4", 320e9, {"fp16": 65e12}),
        ("a100-sxm4-80gb", 2039e9, {"bf16": 312e12, "tf32": 156e12, "int8": 624e12}),
        ("l4", 300e9, {"bf16": 121e12, "fp8": 242.5e12}),
        ("l40s", 864e9, {"bf16": 362e12, "fp8": 733e12}),
        ("h100-sxm5-80gb", 3.35e12, {"bf16": 989e12, "fp8": 1979e12}),
        ("mi300x", 5.3e12, {"bf16": 1307.4e12, "fp8": 2614.9e12}),
        ("rtx-4090", 1008e9, {"fp16": 165.2e12}),
    ):
        device = get_device(name)
        assert device.memory_bandwidth_bytes_per_second == pytest.approx(
            bytes_per_second, rel=0.02
        )
        for dtype, peak in flops.items():
            assert device.peak_flops_per_second[dtype] == pytest.approx(peak, rel=0.02)


def test_half_the_bits_never_multiply_slower_and_consumer_cards_alone_sum_at_half():
    for device in list_devices():
        peaks = device.peak_flops_per_second
        for wide, narrow in (("bf16", "fp8"), ("fp8", "nvfp4"), ("int8", "int4")):
            if wide in peaks and narrow in peaks:
                assert peaks[narrow] >= peaks[wide], device.id
    halved = {device.id for device in list_devices() if device.halves_wide_sums}
    assert "rtx-4090" in halved
    assert not halved & {"rtx-4000-ada", "rtx-6000-ada", "h100-sxm5-80gb", "l4"}


def test_every_alias_leads_to_one_device_and_no_two_models_share_a_name():
    owners: dict[str, set[str]] = {}
    for device in list_devices():
        for alias in device.aliases:
            owners.setdefault(device_slug(alias), set()).add(device.id)
    assert [name for name, ids in owners.items() if len(ids) > 1] == []
    names = [name.lower() for entry in list_models() for name in (entry.id, *entry.aliases)]
    assert len(names) == len(set(names))
    assert get_model(names[-1].upper()) == get_model(names[-1])


@given(name=st.text(max_size=40))
def test_a_slug_of_a_slug_is_the_slug(name):
    slug = device_slug(name)
    assert device_slug(slug) == slug
    assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert "--" not in slug


def test_a_chip_belongs_to_the_architecture_that_its_name_begins():
    for device_id, architecture, family in (
        ("h200-sxm", "hopper", "hopper"),
        ("rtx-6000-ada", "rtx", "ada"),
        ("rtx-4090", "rtx", "ada"),
        ("rtx-5090", "rtx", "blackwell-graphics"),
        ("b200-sxm", "blackwell", "blackwell"),
        ("a100-pcie-40gb", "ampere", "ampere"),
        ("a10", "a10", "ampere-graphics"),
        ("mi300x", "mi300x", "cdna"),
        ("home-made", "home", "home"),
    ):
        device = DeviceSpec(id=device_id, memory_bytes=1, memory_bandwidth_bytes_per_second=1)
        assert (device.architecture, device.family) == (architecture, family)


@given(name=st.text(max_size=12), known=st.lists(st.text(min_size=1, max_size=12), max_size=20))
def test_nearest_names_are_few_known_and_different(name, known):
    found = nearest_names(name, known)
    assert len(found) <= 5
    assert set(found) <= set(known)
    assert len(found) == len(set(found))


def test_a_part_of_a_name_finds_the_name_after_those_that_look_alike():
    known = ("meta-llama/Llama-3.1-8B", "unsloth/Llama-3.1-8B-bnb", "google/gemma-2b")
    found = nearest_names("Llama-3.1-8B", known)
    assert found[0] == "meta-llama/Llama-3.1-8B"
    assert "google/gemma-2b" not in found


def test_the_grid_of_llama_2_7b_explains_the_carbon_of_its_larger_sisters():
    """Touvron et al. 2023, arXiv:2307.09288, table 2: 7B took 184,320 hours at 400 W, 31.22 t."""
    grams_per_kwh = 31.22e6 / (184_320 * 0.4)
    for gpu_hours, watts, tonnes in (
        (368_640, 400, 62.44),
        (1_038_336, 350, 153.90),
        (1_720_320, 400, 291.42),
    ):
        joules = run_joules(num_devices=1, power_watts=watts, duration_s=gpu_hours * 3600)
        grams = of_electricity(energy_joules=joules, per_kwh=grams_per_kwh)
        assert grams / 1e6 == pytest.approx(tonnes, rel=0.005), (gpu_hours, watts, tonnes)


def test_deepseek_v3_costs_what_its_report_says():
    """DeepSeek-V3, arXiv:2412.19437, table 1: at 2 dollars an hour of one H800."""
    for gpu_hours, million_usd in (
        (2_664e3, 5.328),
        (119e3, 0.238),
        (5e3, 0.01),
        (2_788e3, 5.576),
    ):
        days = gpu_hours / 2048 / 24
        found = run_usd(num_devices=2048, hourly_usd=2.0, duration_s=days * 86_400)
        assert found / 1e6 == pytest.approx(million_usd), (gpu_hours, million_usd)


@given(
    devices=st.integers(1, 64),
    usd=st.floats(0.1, 20),
    rate=st.floats(1, 1e6),
    watts=st.floats(1, 1e3),
)
def test_a_million_tokens_cost_the_time_that_they_take(devices, usd, rate, watts):
    seconds = 1e6 / rate
    machine = {"num_devices": devices}
    price = usd_per_million_tokens(**machine, hourly_usd=usd, tokens_per_s=rate)
    joules = joules_per_token(**machine, power_watts=watts, tokens_per_s=rate) * 1e6
    assert price == pytest.approx(run_usd(**machine, hourly_usd=usd, duration_s=seconds))
    assert joules == pytest.approx(run_joules(**machine, power_watts=watts, duration_s=seconds))


def test_an_idle_device_draws_its_idle_share_and_a_busy_one_its_rating():
    rating = {"power_watts": 700.0, "idle_ratio": 0.1}
    drawn = [float(drawn_watts(**rating, active_ratio=ratio)) for ratio in (0.0, 0.5, 1.0)]
    assert drawn == pytest.approx([70, 385, 700])


def advice(**fields):
    return " ".join(search(engine="vllm", **fields).plans[0].advice)


def test_every_plan_names_its_tier():
    for fields, tier in (
        ({"device": "m2-max"}, "tier_local_machine"),
        ({"device": "rtx-4090"}, "tier_local_machine"),
        ({"device": "rtx-4090", "devices": 2}, "tier_local_server"),
        ({"device": "h100-sxm-80gb"}, "tier_local_server"),
        ({"cluster": "aws/p5.48xlarge"}, "tier_cloud"),
        ({"cluster": {"device": "h100", "devices_per_node": 8, "nodes": 2}}, "tier_hpc"),
    ):
        engine = "llama_cpp" if fields.get("device") == "m2-max" else "vllm"
        assert search(engine=engine, **fields).plans[0].tier == tier, (fields, tier)
        assert tier in TECHNIQUES, (fields, tier)


def test_rules_of_thumb_about_sizes_are_held_against_the_plan():
    said = advice(model=LLAMA_8B, device="rtx-3060-12gb", workload=GENERATE)
    assert "fits a 12 GB card in FP16" in said
    assert "16-bit weights are 16.1 GB" in said

    said = advice(model=LLAMA_70B, device="rtx-a6000", workload=GENERATE)
    assert "141 GB against 52 GB" in said

    said = advice(model=LLAMA_405B, device="b200", devices=8, workload=GENERATE)
    assert "8 devices of one server hold it" in said

    long = {"kind": "serve", "input_tokens": 30000, "output_tokens": 1000, "concurrency": 8}
    said = advice(device="h100-sxm-80gb", workload=long, pins={"weight_dtype": "bf16"})
    assert "that is 19 GB" in said

    lora = search(device="h100-sxm-80gb", workload={**TRAIN, "method": "lora"}).plans[0]
    assert lora.advice == ()  # the rule of 16 bytes is one of full training with Adam

    for model, devices in (("deepseek-ai/DeepSeek-V3", 8), ("Qwen/Qwen3-235B-A22B", 8)):
        said = advice(model=model, device="b200", devices=devices, workload=GENERATE)
        assert "405B" not in said, model


def test_every_rule_names_who_says_it_and_is_silent_where_it_holds():
    short = {"kind": "serve", "input_tokens": 128, "output_tokens": 64, "concurrency": 2}
    assert advice(device="h100-sxm-80gb", workload=short) == ""
    for rule in RULES:
        assert rule.source, rule
        assert rule.says[0].islower(), rule
