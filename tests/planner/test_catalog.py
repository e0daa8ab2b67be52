"""The catalogs: what is known, by which names, and how an unknown name is refused."""

import pytest

from planner.catalog.devices import device_slug, get_device, list_devices
from planner.catalog.engines import generic_engines, get_engine, list_engines
from planner.catalog.models import get_model, list_models
from planner.errors import UnknownDeviceError, UnknownModelError


def test_there_are_at_least_forty_models_and_a_hundred_devices():
    assert len(list_models()) >= 40
    assert len(list_devices()) >= 100


def test_llama_3_1_comes_first():
    assert [entry.id for entry in list_models()[:3]] == [
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-405B",
    ]


@pytest.mark.parametrize(
    "name", ["meta-llama/Meta-Llama-3.1-8B-Instruct", "META-LLAMA/llama-3.1-8b"]
)
def test_a_model_is_found_by_alias_and_in_any_case(name):
    assert get_model(name).id == "meta-llama/Llama-3.1-8B"


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(UnknownModelError) as caught:
        get_model("meta-llama/Llama-3.1-9B")

    assert "meta-llama/llama-3.1-8b" in [name.lower() for name in caught.value.nearest]


@pytest.mark.parametrize(
    ("name", "device_id"),
    [
        ("H100-SXM5-80GB", "h100-sxm5-80gb"),
        ("h100-sxm-80gb", "h100-sxm5-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("m2-max", "apple-m2-max"),
        ("A100", "a100-sxm4-80gb"),
    ],
)
def test_a_device_is_found_by_its_usual_spellings(name, device_id):
    assert get_device(name).id == device_id


def test_an_unknown_device_is_refused_with_the_nearest_names():
    with pytest.raises(UnknownDeviceError, match="nearest: h100") as caught:
        get_device("h1000")

    assert caught.value.field == "cluster.device"


def test_a_slug_has_one_hyphen_for_every_run_of_other_characters():
    assert device_slug("  A100 (SXM4) 80GB ") == "a100-sxm4-80gb"


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.id)
def test_every_device_says_where_its_figures_are_from(device):
    assert device.source
    assert device.as_of


@pytest.mark.parametrize("model", list_models(), ids=lambda model: model.id)
def test_every_model_says_where_it_is_from(model):
    assert get_model(model.id).source
    assert get_model(model.id).as_of


def test_peaks_are_dense():
    peaks = get_device("h100").peak_flops_per_second

    assert peaks["bf16"] == 9.89e14
    assert peaks["fp8"] == 1.979e15


def test_links_are_in_bytes_not_bits():
    assert get_device("h100").intra_node_bandwidth_bytes_per_second == 450e9


def test_what_a_matrix_product_reaches_is_below_the_peak():
    for device in list_devices():
        for dtype, reached in device.achieved_flops_per_second.items():
            assert reached <= device.peak_flops_per_second[dtype]


@pytest.mark.parametrize("key", [*list_engines(), *generic_engines(), "never-heard-of"])
def test_every_engine_has_figures_on_every_kind_of_device(key):
    for kind in ("gpu", "cpu", "uma", "accelerator"):
        assert 0 < get_engine(key, kind).matmul_efficiency <= 1


def test_an_engine_without_figures_of_its_own_is_marked():
    assert get_engine("never-heard-of", "gpu").is_generic
    assert not get_engine("vllm", "gpu").is_generic


def test_a_price_comes_with_the_offers_and_the_day_that_it_is_from():
    device = get_device("h100-sxm-80gb")

    assert 1 < device.price_usd_per_hour < 10
    assert "on-demand offers" in device.price_source
    assert "2026-" in device.price_source


def test_a_device_that_nobody_rents_out_has_no_price():
    assert get_device("m2-max").price_usd_per_hour is None


def test_a_name_that_begins_with_a_known_one_names_that_first():
    with pytest.raises(UnknownModelError) as caught:
        get_model("Qwen/Qwen3-8B-of-mine")

    assert caught.value.nearest[0] == "Qwen/Qwen3-8B"
