"""Buttons of a page that name a model, a technique or a host lead to a plan for just that."""

import html
import re

import pytest

from planner.techniques.registry import TECHNIQUES
from tests.webapp.conftest import client_of, enrol
from webapp.hosts.machines import virtual_host_create
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.wizard.technique_drafts import is_carried

pytestmark = pytest.mark.django_db(databases="__all__")
LINK = re.compile(r'<a class="[^"]*button[^"]*" href="([^"]+)">([^<]+)</a>')
MODEL = "meta-llama/Llama-3.1-70B"


@pytest.fixture
def config_model(team) -> TeamModel:
    return TeamModel.objects.create(
        team=team, name="own", source="config", config=demo_config(), num_parameters=1
    )


def follow(client, page: str, words: str):
    """Press the link of a page that has these words; return the plan and the step it shows."""
    text = client.get(page).content.decode()
    links = {html.unescape(name).strip(): html.unescape(href) for href, name in LINK.findall(text)}
    assert words in links, (page, words, sorted(links))
    answer = client.get(links[words])
    _, _, plan_id, _, step, _ = answer["Location"].split("/")
    return Plan.objects.get(pk=plan_id), step, client.get(answer["Location"]).content.decode()


def test_a_link_arrives_with_what_its_page_names(alice, host, config_model):
    # page, link, step that opens, value at a path of the draft, words on the page that opens
    own, here = config_model.pk, host.pk
    table = [
        (f"/models/{MODEL}/", "Serve this model", "workload", "model.catalog_id", MODEL, "Llama 3.1 70B"),
        (f"/models/{MODEL}/", "Fine-tune this model", "workload", "goal", "finetune", "Llama 3.1 70B"),
        (f"/models/{own}/", "Serve this model", "workload", "model.team_model", own, "own"),
        (f"/hosts/{host.slug}/", f"Plan for {host.name}", "goal", "hardware.host", here, host.name),
        ("/techniques/qlora/", "Plan with this technique", "model", "workload.method", "qlora", "QLoRA"),
        ("/techniques/gptq/", "Plan with this technique", "model", "pins.quantization", "gptq", "GPTQ"),
        ("/techniques/tensor_parallel/", "Plan with this technique", "model", "hardware.devices_per_node", 2, "has too few"),
    ]  # fmt: skip
    client = client_of(alice)
    for page, words, step, path, value, seen in table:
        plan, opened, text = follow(client, page, words)
        found = plan.document.model_dump(mode="json")
        for name in path.split("."):
            found = found[name]
        assert (opened, found) == (step, value), (page, words)
        assert seen in text, (page, words)


def test_a_host_that_only_plans_arrives_as_the_hardware_of_a_plan_to_serve(alice, team):
    virtual = virtual_host_create(
        team=team, name="later", device="h200", num_devices=8, memory_bytes=None, by="olga"
    )
    plan, step, _ = follow(client_of(alice), "/hosts/later/", "Plan for later")
    assert (plan.document.goal, plan.document.hardware.host, step) == ("serve", virtual.pk, "goal")


def test_a_preset_without_a_model_has_its_goal(alice, host):
    for preset, goal in (("tune", "finetune"), ("quantize", "compress"), ("generate", "generate")):
        client_of(alice).get(f"/plans/new/?preset={preset}")
        assert Plan.objects.latest("created_at").document.goal == goal, preset


def test_a_preset_does_not_drop_its_model_and_what_it_cannot_use_is_refused(alice, config_model):
    client = client_of(alice)
    client.get(f"/plans/new/?preset=serve&model={config_model.pk}")
    assert Plan.objects.get().document.model.team_model == config_model.pk
    refused = {
        f"?preset=demo&model={MODEL}": 400, f"?technique=lora&model={MODEL}": 400,
        "?technique=lora&preset=serve": 400, "?technique=alchemy": 404, "?model=nobody/nothing": 404,
    }  # fmt: skip
    for query, status in refused.items():
        assert client.get(f"/plans/new/{query}").status_code == status, query


def test_a_technique_on_catalog_devices_says_why_and_counts_ranks_of_experts(alice, team):
    client = client_of(alice)

    def said() -> tuple[int | None, str]:
        page = client.get("/plans/new/?technique=expert_parallel", follow=True)
        hardware = Plan.objects.latest("created_at").document.hardware
        return hardware.devices_per_node, " ".join(map(str, page.context["messages"]))

    needed, words = said()
    assert needed == TECHNIQUES["expert_parallel"].settings["expert_parallel_size"]
    assert "too few" not in words
    host, _ = enrol(team)
    needed, words = said()
    assert f"because {host.name} has too few" in words


def test_every_technique_that_a_plan_can_state_is_stated_by_its_draft(alice):
    client, lost = client_of(alice), []
    for key, technique in TECHNIQUES.items():
        text = client.get(f"/techniques/{key}/").content.decode()
        if ("Plan with this technique" in text) != is_carried(technique):
            lost.append((key, "button"))
        if not is_carried(technique):
            continue
        location = client.get(f"/plans/new/?technique={key}")["Location"]
        document = Plan.objects.get(pk=location.split("/")[2]).document
        stated = document.pins.model_dump(mode="json", exclude_none=True)
        if any(stated.get(name) is None for name in technique.settings):
            lost.append((key, stated))
        values = document.workload.model_dump()
        used = [
            (path.partition(".")[2], ok) for each in technique.used for path, ok in each.items()
        ]
        if not technique.settings and not any(values.get(name) in ok for name, ok in used):
            lost.append((key, values))
    assert not lost, lost
    assert sum(map(is_carried, TECHNIQUES.values())) > len(TECHNIQUES) // 2
