"""The exports of a plan: shown, copied, downloaded, for everybody who may see the plan."""

import pytest

from tests.webapp.conftest import client_of
from webapp.plans.exporting import exports_of, file_of
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, plan_keep

pytestmark = pytest.mark.django_db


@pytest.fixture
def served(serve_plan) -> Plan:
    return plan_keep(serve_plan, "Serve of today")


def get(user, plan, key: str = ""):
    return client_of(user).get(f"/plans/{plan.pk}/exports/{key}")


def test_a_training_plan_is_shown_in_every_format_to_copy_and_to_download(alice, kept):
    context = get(alice, kept).context
    assert [one.key for one in context["formats"]] == list(current_answer(kept).plans[0].exports)
    assert "torchrun" in [one.key for one in context["formats"]]

    html = get(alice, kept).content.decode()
    for one in exports_of(kept, current_answer(kept)):
        assert f'data-copy="#export-{one.key}"' in html
        assert f'href="/plans/{kept.pk}/exports/{one.key}/"' in html

    html = get(alice, kept).content.decode()
    assert html.count('id="export-measure"') == 1
    assert "step_seconds" in html


def test_a_serving_plan_downloads_as_the_tools_file(alice, served):
    for key in ["vllm", "llama_cpp", "kubernetes"]:
        answer = get(alice, served, f"{key}/")
        name, text = file_of(served, current_answer(served), key)
        assert answer.content.decode() == text, key
        assert answer["Content-Disposition"] == f'attachment; filename="{name}"', key
        assert answer["Content-Type"] == "text/plain; charset=utf-8", key


def test_the_measuring_script_downloads_and_what_cannot_say_the_plan_does_not(alice, served):
    text = get(alice, served, "measure/").content.decode()
    compile(text, "measure.py", "exec")
    assert "ttft_seconds" in text

    for key in ["deepspeed", "fortran"]:
        assert get(alice, served, f"{key}/").status_code == 404, key


def test_an_answer_from_before_is_exported_to_its_team_without_formats_that_are_gone(
    charlie, kept, alice
):
    assert get(charlie, kept, "torchrun/").status_code == 404

    current_answer(kept)
    kept.answer = {name: value for name, value in kept.answer.items() if name != "request"}
    kept.save()
    assert get(alice, kept, "torchrun/").status_code == 200

    current_answer(kept)
    kept.answer["plans"][0]["exports"] = ["torchrun", "fortran"]
    kept.save()
    assert [one.key for one in exports_of(kept, current_answer(kept))] == ["torchrun"]


def test_a_plan_that_does_not_fit_exports_only_its_question(alice, served):
    current_answer(served)
    served.answer["plans"] = []
    served.save()
    context = get(alice, served).context

    assert context["formats"] == []
    assert context["measure"] == ""
    assert get(alice, served, "measure/").status_code == 404


def test_a_draft_that_cannot_be_asked_downloads_nothing(alice, demo_plan):
    demo_plan.draft["hardware"] |= {"choice": "catalog", "device": "a-card-of-yesterday"}
    demo_plan.save()
    assert get(alice, demo_plan, "torchrun/").status_code == 404


def test_advice_that_the_figures_contradict_is_on_the_why_tab(alice, served):
    current_answer(served)
    served.answer["plans"][0]["advice"] = ["a rule of thumb says 2 GB; here it takes 3 GB"]
    served.save()
    html = client_of(alice).get(f"/plans/{served.pk}/why/").content.decode()

    assert "Against common advice" in html
    assert "<li>A rule of thumb says 2 GB; here it takes 3 GB.</li>" in html
