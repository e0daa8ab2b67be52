"""The list and the pages of a plan: tabs, what became of it, exports."""

import json
import re
from html import unescape

import pytest

from planner.specs.estimate import PlanRequest
from runners.plans.document import HardwareChoice, ModelChoice
from tests.plugins.extent import sample
from tests.webapp.conftest import client_of, new_attempt
from webapp.core.clock import now
from webapp.core.display import memory
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import Job, Measurement
from webapp.plans.alternatives import strategies_of
from webapp.plans.engine_words import engine_title
from webapp.plans.exporting import exports_of, file_of
from webapp.plans.models import Plan, PlanState
from webapp.plans.planning import current_answer, plan_compute, plan_keep, stored_answer
from webapp.wizard.drafts import serve_document, stored_draft

pytestmark = pytest.mark.django_db
TABS = ["", "alternatives/", "why/", "exports/", "history/"]


@pytest.fixture
def kept(demo_plan) -> Plan:
    return plan_keep(demo_plan, "Demo of today")


def page(user, plan, tab: str = "") -> str:
    response = client_of(user).get(f"/plans/{plan.pk}/{tab}")
    assert response.status_code == 200
    return response.content.decode()


def test_every_tab_answers_the_team_without_a_style_attribute(alice, kept, charlie):
    for tab in TABS:
        html = page(alice, kept, tab)
        assert "Demo of today" in html, tab
        assert " style=" not in html, tab
        assert client_of(charlie).get(f"/plans/{kept.pk}/{tab}").status_code == 404, tab
    assert client_of(alice).get(f"/plans/{kept.pk}/price/").status_code == 404


def test_the_summary_answers_first_in_one_sentence_and_draws_memory_in_words(alice, kept):
    html = page(alice, kept)
    assert html.index("to spare") < html.index("Memory on each device")
    assert 'aria-label="Memory: ' in page(alice, kept)


def test_the_why_tab_shows_equations_and_the_alternatives_a_reason_for_each_loser(alice, kept):
    html = page(alice, kept, "why/")
    assert html.count('class="eq"') >= 10
    assert "rates measured on this host" in html
    html = page(alice, kept, "alternatives/")
    assert "Needs at least 2 devices" in html


def test_the_exported_question_is_one_that_the_planner_reads(alice, kept):
    context = client_of(alice).get(f"/plans/{kept.pk}/exports/").context
    texts = {key: text for key, _, _, text in context["exports"]}
    assert PlanRequest.model_validate_json(texts["question"]).workload.kind == "train"
    assert '"kind": "train"' in texts["job"]


def test_a_plan_whose_host_was_measured_again_says_so_until_it_is_planned_again(alice, kept, host):
    page(alice, kept)
    for rates in ("memory_bandwidth_bytes_per_second", "flops_per_second"):
        device = host.microbench["devices"][0]
        known = device[rates]
        device[rates] = known | {"fp32": 2 * known["fp32"]} if rates[0] == "f" else 2 * known
        host.save()
        assert "The inputs of this plan have changed" in page(alice, kept), rates
    client_of(alice).post(f"/plans/{kept.pk}/compute/")
    assert "The inputs of this plan have changed" not in page(alice, kept)


def test_a_plan_whose_host_is_gone_shows_what_was_said_and_what_to_do(alice, kept, host):
    page(alice, kept)
    host.delete()
    html = page(alice, kept)
    assert "The inputs of this plan have changed" in html
    assert "to spare" in html
    html = client_of(alice).post(f"/plans/{kept.pk}/compute/", follow=True).content.decode()
    assert "no longer part of your team" in html


def test_a_deleted_plan_leaves_the_list_and_its_jobs_still_show_it(alice, kept):
    job = plan_launch(plan=kept, by=alice)
    client = client_of(alice)

    client.post(f"/plans/{kept.pk}/delete/", follow=True)

    assert kept.name not in client.get("/plans/").content.decode()
    assert kept.pk not in client.get("/search/", {"q": kept.name}).content.decode()
    job.refresh_from_db()
    assert job.plan == kept
    assert "This plan is deleted" in page(alice, kept)


def test_a_viewer_reads_and_a_deleted_plan_that_no_job_ran_is_gone(vera, kept, alice):
    offered = page(vera, kept) + client_of(vera).get("/plans/").content.decode()
    for barred in ("/clone/", "/delete/", "/edit/", "/plans/new/"):
        assert barred not in offered, barred
    assert client_of(vera).post(f"/plans/{kept.pk}/delete/").status_code == 403

    client_of(alice).post(f"/plans/{kept.pk}/delete/")
    assert not Plan.objects.exists()


def test_the_list_shows_the_teams_plans_by_name_and_nothing_of_another(bob, kept, charlie, alice):
    assert "Demo of today" in client_of(bob).get("/plans/").content.decode()
    assert "Demo of today" not in client_of(charlie).get("/plans/").content.decode()
    client = client_of(alice)
    assert "Demo of today" in client.get("/plans/?q=TODAY").content.decode()
    assert "No plan has" in client.get("/plans/?q=yesterday").content.decode()


def test_a_colleagues_draft_is_not_in_the_list(bob, demo_plan):
    assert demo_plan.state == PlanState.DRAFT
    assert "Make a plan" in client_of(bob).get("/plans/").content.decode()


def test_the_list_asks_the_database_as_often_for_many_plans(
    alice, kept, django_assert_max_num_queries
):
    client = client_of(alice)
    for number in range(30):
        kept.pk, kept.name = None, f"plan {number}"
        kept.pk = kept.series = f"01J{number:023d}"
        kept.save(force_insert=True)

    with django_assert_max_num_queries(9):
        client.get("/plans/")


def test_no_tab_asks_the_database_more_often_than_a_bound(
    alice, kept, django_assert_max_num_queries
):
    for tab in TABS:
        client = client_of(alice)
        client.get(f"/plans/{kept.pk}/{tab}")
        with django_assert_max_num_queries(13):  # one says where a tuning could run
            client.get(f"/plans/{kept.pk}/{tab}")


# A team's plans when there are none or many, and what became of a plan


PAGE_SIZE = 50
DASH = "\u2013"  # en dash


@pytest.fixture
def job(kept, alice) -> Job:
    return plan_launch(plan=kept, by=alice)


def shown(user, path: str):
    response = client_of(user).get(path)
    assert response.status_code == 200
    return response


def html(user, path: str) -> str:
    return shown(user, path).content.decode()


def add_plans(team, owner, count: int, **fields) -> None:
    """Plans named "plan 0" on, saved in this order."""
    for number in range(count):
        known = {"name": f"plan {number}", "state": PlanState.COMPUTED, **fields}
        Plan.objects.create(team=team, owner=owner, **known)


def names(response) -> list[str]:
    return [plan.name for plan, *_ in response.context["rows"]]


# The list


def test_one_plan_more_than_a_page_holds_is_on_the_second(alice, team):
    add_plans(team, alice, PAGE_SIZE)
    full = shown(alice, "/plans/")
    assert len(names(full)) == PAGE_SIZE
    assert "Older" not in full.content.decode()

    add_plans(team, alice, 1, name="one more")
    assert f"1{DASH}50 of 51" in html(alice, "/plans/")
    for number in ("1", ""):
        assert names(shown(alice, f"/plans/?page={number}"))[0] == "one more", number
    for number in ("2", "3", str(10**30)):  # what is not there any more is the last
        assert names(shown(alice, f"/plans/?page={number}")) == ["plan 0"], number


def test_the_second_page_keeps_a_filter_with_special_characters(alice, team):
    add_plans(team, alice, PAGE_SIZE + 1, name="a & b = 100 %")
    text = html(alice, "/plans/?q=a+%26+b+%3D+100+%25")
    assert 'href="?page=2&amp;q=a%20%26%20b%20%3D%20100%20%25"' in text


def test_a_filter_is_text_that_matches_itself_without_the_blanks_around_it(alice, team):
    add_plans(team, alice, 2)
    for query in ("%25", "_", "plan%25", "%5C"):  # a database matches anything with some of them
        assert names(shown(alice, f"/plans/?q={query}")) == [], query
    assert names(shown(alice, "/plans/?q=%20%20plan%201%20")) == ["plan 1"]
    text = html(alice, "/plans/?q=%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert" not in text
    assert "No plan has “&lt;script&gt;" in text


def test_each_plan_of_the_list_says_how_far_it_came(alice, team):
    for fields, word in (
        ({"state": PlanState.DRAFT, "revision": 1, "answer": {"plans": [{}]}}, "draft"),
        ({"state": PlanState.COMPUTED, "answer": {}}, "incomplete"),
        ({"state": PlanState.COMPUTED, "answer": {"plans": []}}, "does-not-fit"),
        ({"state": PlanState.COMPUTED, "answer": {"plans": [{}]}}, "computed"),
    ):
        Plan.objects.all().delete()
        add_plans(team, alice, 1, **fields)
        rows = shown(alice, "/plans/").context["rows"]
        assert [verdict for _, verdict, _ in rows] == [word], fields


def test_a_draft_without_a_name_leads_back_into_the_wizard_until_it_is_deleted(alice, demo_plan):
    Plan.objects.filter(pk=demo_plan.pk).update(name="", revision=0)
    assert demo_plan.pk not in html(alice, "/plans/")  # nobody changed it

    Plan.objects.filter(pk=demo_plan.pk).update(revision=1)
    text = html(alice, "/plans/")
    assert "Unfinished plan" in text
    for place in ("/plans/", f"/plans/{demo_plan.pk}/", f"/plans/{demo_plan.pk}/edit/review/"):
        assert f'action="/plans/{demo_plan.pk}/delete/"' in html(alice, place), place
    assert f'href="/plans/{demo_plan.pk}/edit/goal/"' in text

    Plan.objects.filter(pk=demo_plan.pk).update(name="")
    answer = client_of(alice).post(f"/plans/{demo_plan.pk}/delete/", follow=True)
    assert "The draft is deleted." in answer.content.decode()
    assert client_of(alice).get(f"/plans/{demo_plan.pk}/").status_code == 404


def test_a_plan_whose_owner_is_gone_stays_with_a_dash(bob, alice, kept):
    alice.delete()
    text = html(bob, "/plans/")
    assert "Demo of today" in text
    assert '<td class="quiet hide-s">—</td>' in text


# What became of a plan


def measure(job: Job, measured: float, **changes) -> Measurement:
    fields = {
        "metric": "step_seconds",
        "unit": "seconds",
        "predicted": 2.0,
        "predicted_low": 1.5,
        "predicted_high": 2.5,
        **changes,
    }
    return Measurement.objects.create(
        job=job,
        attempt=job.current_attempt,
        host=job.host,
        measured=measured,
        ratio=measured / fields["predicted"],
        measured_at=now(),
        **fields,
    )


def history(user, plan):
    return shown(user, f"/plans/{plan.pk}/history/")


def test_a_plan_that_was_never_launched_has_an_empty_history(alice, kept):
    text = history(alice, kept).content.decode()
    assert "Nothing has been launched from this plan yet." in text
    assert "Predicted and measured" not in text


def test_both_ends_of_an_interval_are_inside_and_without_one_nothing_was_hit(alice, kept, job):
    for measured, is_inside in ((1.49, False), (1.5, True), (2.5, True), (2.51, False)):
        made = measure(job, measured)
        met = history(alice, kept).context["measured"]
        assert [each.is_inside for each in met] == [is_inside], measured
        made.delete()
    measure(job, 2.0, predicted_low=None, predicted_high=None)
    met = history(alice, kept).context["measured"][0]
    assert (met.is_inside, met.ratio) == (False, 1.0)


def test_figures_are_named_and_in_their_units_even_if_nobody_listed_them(alice, kept, job):
    measure(job, 0.25)
    met = history(alice, kept).context["measured"][0]
    assert (met.metric, met.predicted, met.measured) == ("Step time", "2.0\u00a0s", "250\u00a0ms")

    measure(job, 3.0, metric="cache_hit_ratio", unit="")
    found = {each.metric for each in history(alice, kept).context["measured"]}
    assert found == {"Step time", "Cache hit ratio"}


def test_the_history_sets_measured_beside_predicted(alice, kept, job):
    measure(job, 2.2)
    text = history(alice, kept).content.decode()
    assert "1.10" in text
    assert "inside" in text


def test_the_last_job_of_a_plan_is_shown_first(alice, kept, job):
    second = plan_launch(plan=kept, by=alice)
    new_attempt(second)
    measure(job, 2.0)
    measure(second, 2.2)

    context = history(alice, kept).context

    assert [one.pk for one in context["jobs"]] == [second.pk, job.pk]
    assert [met.job.pk for met in context["measured"]] == [second.pk, job.pk]


def test_a_deleted_job_or_a_hostile_name_leaves_the_history(alice, kept, job):
    Job.objects.filter(pk=job.pk).update(name="<img src=x>")
    assert "<img src=x>" not in history(alice, kept).content.decode()

    measure(job, 2.0)
    Job.objects.filter(pk=job.pk).update(deleted_at=now())
    context = history(alice, kept).context
    assert (list(context["jobs"]), context["measured"]) == ([], [])


# What can be copied


def test_what_is_shown_of_an_export_is_what_is_downloaded(alice, kept):
    text = html(alice, f"/plans/{kept.pk}/exports/")
    file = shown(alice, f"/plans/{kept.pk}/exports/torchrun/").content.decode()
    copied = text.split('id="export-torchrun"')[1].split(">", 1)[1].split("</pre>")[0]
    assert unescape(copied) == file


def test_a_file_is_read_by_whoever_may_read_and_by_no_stranger(alice, vera, client, kept):
    for key in ("torchrun", "measure"):
        assert shown(vera, f"/plans/{kept.pk}/exports/{key}/").content, key
    url = f"/plans/{kept.pk}/exports/torchrun/"
    answer = client.get(url)
    assert answer.status_code == 302
    assert answer["Location"].startswith("/login/")
    assert client_of(alice).post(url).status_code == 405


def test_the_texts_that_can_be_copied_are_those_that_are_stored(alice, kept):
    answer = current_answer(kept)
    context = shown(alice, f"/plans/{kept.pk}/exports/").context
    texts = {key: json.loads(text) for key, _, _, text in context["exports"]}
    assert texts["question"] == kept.request
    assert texts["strategy"] == answer.plans[0].strategy.model_dump(mode="json")


def test_hardware_that_is_only_thought_of_has_a_question_but_no_job(alice, kept):
    kept.draft["hardware"] |= {"host": None, "device": "rtx-4090"}
    kept.answer = {}
    kept.save()
    context = shown(alice, f"/plans/{kept.pk}/exports/").context
    assert [key for key, *_ in context["exports"]] == ["question", "strategy"]


# The exports of a plan: shown, copied, downloaded, for everybody who may see the plan


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
    demo_plan.draft["hardware"] |= {"host": None, "device": "a-card-of-yesterday"}
    demo_plan.save()
    assert get(alice, demo_plan, "torchrun/").status_code == 404


def test_advice_that_the_figures_contradict_is_on_the_why_tab(alice, served):
    current_answer(served)
    served.answer["plans"][0]["advice"] = ["a rule of thumb says 2 GB; here it takes 3 GB"]
    served.save()
    html = client_of(alice).get(f"/plans/{served.pk}/why/").content.decode()

    assert "Against common advice" in html
    assert "<li>A rule of thumb says 2 GB; here it takes 3 GB.</li>" in html


def test_each_alternative_when_chosen_is_the_plan_of_a_new_draft(alice, team):
    document = serve_document(None)
    document.model = ModelChoice(source="catalog", catalog_id="meta-llama/Llama-3.1-8B")
    document.hardware = HardwareChoice(device="rtx-4090", devices_per_node=2)
    for engine in sample((None, "vllm")):  # of several engines, and of one
        document.hardware.engine = engine
        plan = Plan.objects.create(team=team, owner=alice, draft=stored_draft(document))
        plan_compute(plan)
        saved, client = plan_keep(plan, f"70B {engine}", by="alice"), client_of(alice)
        page = client.get(f"/plans/{saved.pk}/alternatives/").content.decode()
        offered = [
            int(number) for number in re.findall(r'name="strategy" value="(\d+)">Use', page)
        ]
        strategies = strategies_of(stored_answer(saved))
        assert offered == list(range(1, len(strategies))), engine
        summary = client.get(f"/plans/{saved.pk}/").content.decode()
        anchors = set(re.findall(r"/alternatives/#(strategy-\d+)", summary))
        assert anchors <= set(re.findall(r'id="(strategy-\d+)"', page)), engine
        for number in {*sample(offered), offered[-1]}:
            sent = {"strategy": number, "step": "review", "revision": saved.revision}
            answer = client.post(f"/plans/{saved.pk}/suggestion/", sent)
            draft = Plan.objects.get(pk=answer["Location"].split("/")[2])
            assert draft.base_id == saved.pk
            found, wanted = stored_answer(draft).plans[0], strategies[number]
            assert (found.strategy, found.engine) == (wanted.strategy, wanted.engine), number
            draft.delete()
    tab = f"/plans/{saved.pk}/alternatives/"
    side = client.get(f"{tab}?strategy=0&strategy={offered[-1]}&strategy=999").context["side"]
    assert side.numbers == (0, offered[-1])
    titles = [engine_title(strategies[at].engine) for at in side.numbers]
    for head, title in zip(side.heads, titles, strict=True):
        assert head.startswith(f"{title} · ") == (len(set(titles)) == 2), side.heads
    rows = dict(side.rows)
    assert all(len(set(cells)) == 2 for cells in side.rows[0][1:]), "what differs comes first"
    assert re.match(r"[\d.]+.tok/s \([\d.]+", rows["Per request"][0])
    assert rows["Memory"] == tuple(
        str(memory(strategies[at].memory.per_device_peak_bytes)) for at in side.numbers
    )
    assert "Tick at least two" in client.get(f"{tab}?strategy=1").content.decode()
    sent = {"strategy": len(strategies), "step": "review", "revision": saved.revision}
    page = client.post(f"/plans/{saved.pk}/suggestion/", sent, follow=True).content.decode()
    assert "belongs to an older verdict" in page
