"""Hardware as people write it: every spelling of a device is that device and no other."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.device_names import LINES, MAKERS
from planner.catalog.devices import (
    device_slug,
    devices_of_every_size,
    find_device,
    get_device,
    list_devices,
    list_instances,
    memory_sizes,
)
from planner.catalog.hardware_names import read_hardware
from planner.specs.base import BadRequestError, UnknownDeviceError

EVERY = devices_of_every_size()
IDS = {device.id for device in list_devices()}
EXACT = {
    name: device.id
    for device in EVERY
    for name in (*device.aliases, device_slug(device.name), device.id)
}
AS_PEOPLE_WRITE_IT = """
    rtx3070 rtx-3070
    rtx4090 rtx-4090
    4090 rtx-4090
    3090 ti|rtx-3090-ti
    2xrtx3090 rtx-3090 2
    4x4090 rtx-4090 4
    2x 3090 ti|rtx-3090-ti 2
    gtx1080ti gtx-1080-ti
    rx7900xtx rx-7900-xtx
    4090 laptop|rtx-4090-laptop
    NVIDIA GeForce RTX 4070 Laptop GPU|rtx-4070-laptop
    6000 ada|rtx-6000-ada
    A100-80GB:8 a100-sxm4-80gb 8
    a10080gb a100-sxm4-80gb
    a100 40G|a100-sxm4-40gb
    H100:8 h100-sxm5-80gb 8
    8*h100 h100-sxm5-80gb 8
    8 h100s|h100-sxm5-80gb 8
    2 l40s|l40s 2
    dual 3090|rtx-3090 2
    Two RTX 4090s|rtx-4090 2
    quad a6000|rtx-a6000 4
    h100x8 h100-sxm5-80gb 8
    mi250xx2 mi250x 2
    h100 80gb pcie|h100-pcie-80gb
    2x8xh100 h100-sxm5-80gb 8 2
    2 nodes of 8 h100|h100-sxm5-80gb 8 2
    m2 apple-m2-10gpu
    m2 8gb|apple-m2-10gpu-8gb
    macbook pro m4 max|apple-m4-max
    m3 max 64gb|apple-m3-max-64gb
    m3 max 36gb|apple-m3-max-30gpu-36gb
    m3max96gb apple-m3-max-30gpu
    Mac mini M4 Pro 48GB|apple-m4-pro-48gb
    64xh200 h200-sxm-141gb 8 8
    1x64xh200 h200-sxm-141gb 64 1
    12xh200 h200-sxm-141gb 6 2
    16xa100-40gb a100-sxm4-40gb 16 1
    72xgb200 gb200-nvl72 72 1
    2xdgx-spark gb10-dgx-spark 1 2
    16xtpu-v5e tpu-v5e 16 1
"""


def test_hardware_is_read_as_people_write_it_in_nodes_that_are_built():
    wrong = []
    for line in AS_PEOPLE_WRITE_IT.strip().splitlines():
        left, _, right = (
            line.strip().rpartition("|") if "|" in line else line.strip().partition(" ")
        )
        device, *counts = right.split()
        cluster = {"device": device}
        if counts:
            cluster |= {"devices_per_node": int(counts[0]), "nodes": int((*counts, 1)[1])}
        if (found := read_hardware(left).cluster) != cluster:
            wrong.append((left, found))
    assert not wrong, wrong
    assert "8 nodes of 8 (1x64xh200-sxm-141gb is one node)" in read_hardware("64xh200").note
    assert "24 GB of memory" in read_hardware("m2").note
    for text in ("8xh200", "m2 24gb", "2x8xh200"):
        assert read_hardware(text).note == "", text


def test_what_is_not_a_device_with_this_memory_or_an_equal_split_is_refused():
    for text, words in (
        ("rtx 6000", "nearest: .*rtx-6000-ada"),  # of three generations
        ("m2 12gb", "apple-m2-10gpu-8gb, apple-m2-10gpu-16gb, apple-m2-10gpu-24gb"),
        ("4090 48gb", "no device"),
        ("8xh1000", "nearest: .*h100"),
        ("rtx 4080 laptop 16gb", "no device"),
    ):
        with pytest.raises(UnknownDeviceError, match=words):
            read_hardware(text)
    for text, words in (
        ("13xh200", "2x8xh200-sxm-141gb, or 1x13xh200-sxm-141gb"),
        ("0xh200", "1 or more"),
        ("2x8xaws/p5.48xlarge", "2xaws/p5.48xlarge"),
    ):
        with pytest.raises(BadRequestError, match=re.escape(words)):
            read_hardware(text)


def spellings(device):
    """Yield what people may write for a device."""
    names = {device.id, device.name, *device.aliases}
    for name in names:
        bare = re.sub(rf"\b(?:{'|'.join(MAKERS)})\b[- ]?", "", name, flags=re.IGNORECASE)
        is_others = EXACT.get(device_slug(bare), device.id) != device.id
        for each in {name} if is_others else {name, bare}:
            slug = re.sub(r"[^A-Za-z0-9]+", "-", each).strip("-")
            yield each
            yield from (
                slug,
                slug.replace("-", " "),
                slug.replace("-", "_"),
                slug.replace("-", ""),
            )


SPELLINGS = [(device, text) for device in EVERY for text in sorted(set(spellings(device)))]


@given(
    st.sampled_from(SPELLINGS),
    st.sampled_from((str, str.upper, str.title, str.lower)),
    st.sampled_from(("{}", "2x{}", "2 x {}", "2*{}", "2 {}", "{}x2", "{} x 2", "{}:2", "3x2x{}")),
)
def test_every_spelling_with_a_count_before_or_after_is_its_device(pair, case, form):
    device, text = pair
    cluster = read_hardware(form.format(case(text))).cluster
    assert cluster["device"] == device.id
    counts = (cluster.get("devices_per_node", 1), cluster.get("nodes", 1))
    several = {(1, 2), (2, 1)} if "3x" not in form else {(2, 3)}
    assert counts in ({(1, 1)} if form == "{}" else several)


def test_each_spelling_is_its_device_and_its_memory_may_be_added():
    for device, text in SPELLINGS:
        assert find_device(text).id == device.id, text
    for device in EVERY:
        size = round(device.memory_bytes / 2**30)
        if not re.search(r"\d+-?gb|\d+gb", device.id):
            for text in (
                f"{device.id}-{size}gb",
                f"{device.id} {size} GB",
                f"{device.id}{size}GB",
            ):
                assert find_device(text).memory_bytes == device.memory_bytes, text


def test_a_product_line_may_be_left_out_where_one_device_remains():
    for device in list_devices():
        line, _, rest = device.id.partition("-")
        others = {each for each in IDS if each.partition("-")[2] == rest and each != device.id}
        if line in LINES and rest[:1].isdigit() and not others:
            assert find_device(rest).id == device.id, rest


def test_every_size_sold_is_a_device_with_that_memory_and_says_where_it_is_from():
    for name, sizes in memory_sizes().items():
        for size in sizes.gib:
            found = get_device(f"{name}-{size}gb")
            assert found.memory_bytes == size * 2**30, (name, size)
            assert found.family == get_device(name).family
            assert get_device(found.id).id == found.id
            assert get_device(f"{sizes.chip} {size} gb").memory_bytes == size * 2**30
    for offer in list_instances():
        assert read_hardware(offer.id).cluster == {"instance": offer.id}
