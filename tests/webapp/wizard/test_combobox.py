"""What comboboxes offer: their element, several devices in one text, what is recent and fits."""

import re

import pytest

from tests.webapp.conftest import client_of
from webapp.core.display import TIMES
from webapp.wizard.combobox import device_combobox, model_combobox, several_devices

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_number_of_devices_in_one_text_is_known_in_every_way_to_write_it():
    for text, per_node, nodes in [
        ("4x A100 SXM4 80", 4, 1),
        (f"4 {TIMES} a100 sxm4 80gb", 4, 1),
        ("a100 sxm4 80 x4", 4, 1),
        ("a100 sxm4 80", 1, 1),
        ("16x a100 sxm4 80", 8, 2),
        ("12x a100 sxm4 80", 12, 1),
        ("4x a100-sxm4-80gb", 4, 1),
    ]:
        found = several_devices(text)
        assert [each.device for each in found] == ["a100-sxm4-80gb"], text
        assert (found[0].devices_per_node, found[0].nodes) == (per_node, nodes), text
    assert len(several_devices("a100")) == 3
    for nothing in ("", "4x", "0x a100", "4x abacus"):
        assert several_devices(nothing) == [], nothing


def test_a_combobox_is_a_select_element_that_keeps_a_value_of_its_own():
    element = model_combobox().render("model", "Qwen/Qwen3-8B-FP8", {"id": "id_model"})
    assert '<optgroup label="Typed"><option value="Qwen/Qwen3-8B-FP8" selected>' in element
    assert re.search(r'value="Qwen/Qwen3-8B" data-more="[\d.]+.B parameters · ', element)
    element = device_combobox().render("device", "h100-sxm5-80gb", {"id": "id_device"})
    assert re.search(r'value="h100-sxm5-80gb" data-more="rented at \$[\d.]+/h" selected', element)
    assert 'data-count="id_devices_per_node"' in element
    assert "data-free" not in element


def test_notes_name_what_is_recent_and_what_fits(alice, host):
    client = client_of(alice)
    model = "meta-llama/Llama-3.1-70B"
    client.get(f"/plans/new/?preset=serve&model={model}&hardware=4x a100-sxm4-80gb")
    notes = client.get("/choices/models/").json()
    assert notes["groups"]["Recent"] == [model]
    assert notes["notes"][model] == f"does not fit {host.name}"
    assert client.get("/choices/devices/").json()["groups"]["Recent"] == ["a100-sxm4-80gb"]


def test_a_link_names_a_model_and_its_devices(alice, host):
    client, place = client_of(alice), "hardware=16x+h100-sxm5-80gb"
    page = client.get(f"/plans/new/?preset=serve&model=Qwen/Qwen3-8B&{place}", follow=True)
    hardware = page.context["plan"].document.hardware
    assert page.redirect_chain[-1][0].endswith("/edit/review/")
    assert (hardware.device, hardware.devices_per_node, hardware.nodes) == ("h100-sxm5-80gb", 8, 2)
    assert hardware.is_catalog
    for query, status in [
        ("hardware=4x abacus", 404),
        (f"host={host.pk}&{place}", 400),
        (f"preset=demo&{place}", 400),
        (f"technique=lora&{place}", 400),
    ]:
        assert client.get(f"/plans/new/?{query}").status_code == status, query
