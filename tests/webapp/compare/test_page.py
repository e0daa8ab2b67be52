"""The comparison: which jobs it takes, what it says of them, to whom; and its pieces."""

import re
from types import SimpleNamespace

import pytest

from runners.jobspec import TrainSpec
from tests.webapp.conftest import client_of, make_job
from tests.webapp.metrics.conftest import append
from webapp.charts.plots import ORIGIN_MS
from webapp.jobs import comparing
from webapp.jobs.comparing import Side, cell_text, flat, setting_label, settings_of, sides_of
from webapp.jobs.job_charts import draw
from webapp.jobs.memory_comparison import TermRow
from webapp.jobs.models import Job
from webapp.jobs.overlay_charts import overlays
from webapp.metrics.store import Point

pytestmark = pytest.mark.django_db(databases="__all__")


def get(user, *jobs: Job, more: str = ""):
    query = "&".join(f"job={job.pk}" for job in jobs)
    return client_of(user).get(f"/compare/?{query}{more}")


def page(user, *jobs: Job, more: str = "") -> str:
    text = get(user, *jobs, more=more).content.decode()
    text = text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")
    return re.sub(r"\s+", " ", text)


# What it says


def test_it_says_first_which_is_faster_and_each_figure_with_its_prediction(slow, fast, alice):
    text = page(alice, slow, fast)
    assert "B is fastest with 3 000 tok/s (tokens per second of steps); A reached 2 000" in text
    assert "1.50 times apart" in text

    row = page(alice, slow, fast).split('<th scope="row">Tokens per second of steps</th>')[1]
    assert "predicted 3 000 tok/s, ratio 0.667" in row
    assert "+50 %" in row
    assert "below the interval" in row


def test_settings_that_differ_are_shown_and_all_are_one_link_away(slow, fast, alice):
    text = page(alice, slow, fast)
    assert "Micro batch size" in text
    assert "Sequence length" not in text
    assert "They differ in 1 of" in text

    text = page(alice, slow, fast, more="&all=1")
    assert "Sequence length" in text
    assert '<tr class="chosen"><th scope="row">Micro batch size</th>' in text


def test_joules_and_money_of_a_token_stand_side_by_side(make_run, host, alice):
    host.labels = {"usd_per_kwh": "0.36"}
    host.save()
    jobs = [make_run(name, 2000.0, 4) for name in ("Thirsty", "Frugal")]
    for job, joules in zip(jobs, (4.0, 2.0), strict=True):
        job.result["measured"] |= {"energy_joules_per_token": joules, "gpu0_energy_joules": 900.0}
        job.save()

    text = page(alice, *jobs)
    row = text.split('<th scope="row">Energy per token</th>')[1].partition("</tr>")[0]

    assert '<strong>4.00</strong><span class="unit">J/token</span>' in row
    assert "\N{MINUS SIGN}50 %" in row
    assert '<th scope="row">Energy of gpu0</th>' in text
    assert '<th scope="row">Electricity per million tokens</th>' in text


def test_metrics_lie_over_each_other_without_javascript_with_words_and_table(slow, fast, alice):
    text = page(alice, slow, fast)
    for number in (1, 2):
        assert f'<path class="series-{number}"' in text
        assert f'<path class="series-{number} expected"' in text

    assert "A: tokens per second of steps 2 000 tok/s ·" in text
    assert "B: tokens per second of steps 3 000 tok/s" in text
    assert "B: peak memory 5.00 GiB" in text
    assert text.count("<summary>Table</summary>") == text.count("<figure")


def test_alike_different_and_waiting_jobs_are_said_to_be(slow, alice, make_run, team, host):
    same = make_run("Again", 2000.0, 4)
    text = page(alice, slow, same)
    assert "All are alike" in text
    assert "Every setting is the same." in text

    waiting = make_job(team, alice, host)
    text = page(alice, slow, waiting)
    assert "No figure was measured by all of them yet." in text
    assert "never ran" in text

    other = make_run("Bench", 10.0, 4)
    Job.objects.filter(pk=other.pk).update(kind="benchmark")
    assert "of different kinds (Train, Benchmark)" in page(alice, slow, other)


# Which jobs it takes


def test_four_is_the_most_and_too_many_says_the_way_out(slow, fast, alice, make_run):
    more = [make_run(f"Run {at}", 2500.0, 8) for at in range(3)]
    assert get(alice, slow, fast, *more[:2]).status_code == 200
    answer = get(alice, slow, fast, *more)
    assert answer.status_code == 422
    assert b"At most four jobs can be compared. Clear the others." in answer.content


def test_one_alone_is_offered_others_those_like_it_first(slow, alice, make_run):
    make_run("Other kind", 10.0, 4)
    Job.objects.filter(name="Other kind").update(kind="benchmark")
    make_run("Like it", 10.0, 4)

    text = page(alice, slow)

    assert f'value="{slow.pk}" id="pick-{slow.pk}" checked' in text
    assert text.index("Like it") < text.index("Other kind")


def test_a_job_twice_counts_once_and_can_be_left_out_or_another_added(slow, alice, fast):
    assert "<h1>Compare jobs</h1>" in page(alice, slow, slow)
    text = page(alice, slow, fast)
    assert f'href="/compare/?job={fast.pk}" aria-label="leave out Small batch"' in text
    assert f"/compare/?job={slow.pk}&amp;job={fast.pk}&amp;choose=1" in text
    assert "<h1>Compare jobs</h1>" in page(alice, slow, fast, more="&choose=1")


def test_without_jobs_it_offers_the_latest_and_one_that_is_none_is_not_found(slow, alice):
    for query in ["", "?job="]:
        text = client_of(alice).get(f"/compare/{query}").content.decode()
        assert "Small batch" in text, query

    for name in ["nothing", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "' OR 1=1"]:
        assert client_of(alice).get("/compare/", {"job": [slow.pk, name]}).status_code == 404, name


def test_another_teams_job_is_as_if_it_did_not_exist(slow, fast, charlie, alice):
    assert get(charlie, slow, fast).status_code == 404
    Job.objects.filter(pk=fast.pk).update(deleted_at="2026-01-01T00:00Z")
    assert get(alice, slow, fast).status_code == 404


def test_names_and_settings_are_text(slow, alice, make_run):
    hostile = make_run("<script>alert(1)</script>", 1.0, 4, model_name="<b>x</b>")
    text = page(alice, slow, hostile)
    assert "<script>alert(1)" not in text
    assert "<b>x</b>" not in text


# The ways there


def test_the_jobs_list_and_page_lead_there(slow, fast, alice):
    text = client_of(alice).get("/jobs/").content.decode()
    assert text.count('form="compare"') == 2
    assert '<form id="compare"' in text
    assert f"/compare/?job={slow.pk}" in client_of(alice).get(f"/jobs/{slow.pk}/").content.decode()


# The pieces of a comparison: settings made flat, lines over each other


def charts_of(*jobs):
    return {
        each.chart.key: each
        for each in overlays(sides_of(list(jobs)), [draw(job) for job in jobs])
    }


def test_settings_are_made_flat_and_read_as_words():
    document = {"a": {"b": 1, "c": None}, "d": [], "e": False, "kind": "train"}
    assert dict(flat(document)) == {"a.b": 1, "e": False}
    for value, text in [(True, "yes"), ((1, 2), "1, 2"), (0.5, "0.5"), ("x" * 99, "x" * 79 + "…")]:
        assert cell_text(value) == text, value
    assert setting_label("model.config.hidden_size") == "Model · config · hidden size"


def test_a_job_without_a_layout_differs_from_one_in_what_that_one_sets(make_run, alice):
    copies = make_run("Copies", 1.0, 4)
    layout = {"data_parallel_size": 2, "zero_stage": 2}
    sharded = make_run(
        "Sharded", 1.0, 4, spec=TrainSpec(layout=layout, gradient_accumulation_steps=2)
    )
    later = make_run("Later", 1.0, 4)
    later.spec = {**later.spec, "layout": {"zero_stage": 0, "known_later": "on"}}

    rows = {row.name: row for row in settings_of([copies, sharded, later], alice)}
    of_layout = {name: row.values for name, row in rows.items() if name.startswith("Layout")}

    assert of_layout == {
        "Layout · data parallel size": ("—", "2", "—"),
        "Layout · zero stage": ("—", "2", "—"),
        "Layout · known later": ("—", "—", "on"),
    }


def test_each_line_counts_from_its_own_start_with_its_own_ink_and_letter(slow, fast):
    figure = charts_of(slow, fast)["loss"].figure
    lines = [trace for trace in figure["data"] if trace["mode"] == "lines+text"]
    assert {trace["x"][0] for trace in lines} == {figure["layout"]["xaxis"]["range"][0]}

    lines = [
        trace
        for trace in charts_of(slow, fast)["tokens_per_second"].figure["data"]
        if trace["mode"] == "lines+text"
    ]
    assert [trace["line"]["color"] for trace in lines] == ["var(--series-1)", "var(--series-2)"]
    assert [[text for text in trace["text"] if text] for trace in lines] == [["A"], ["B"]]


def test_the_axis_ends_with_the_longest_and_ended_lines_leave_cells_empty(make_run):
    short, long = make_run("Short", 1.0, 4, points=2), make_run("Long", 1.0, 4, points=9)
    low, high = charts_of(short, long)["loss"].figure["layout"]["xaxis"]["range"]
    assert high - low == 8000

    twin = charts_of(short, long)["loss"].twin
    assert twin[-1][1][0] == ""
    assert twin[-1][1][1] != ""


def test_what_one_job_lacks_is_a_difference_or_no_comparison(slow, make_run, fast, alice):
    silent = make_run("Silent", 1.0, 4, points=0)
    assert charts_of(slow, silent) == {}
    assert set(charts_of(slow, fast)) >= {"loss", "tokens_per_second", "memory"}

    slow.spec = {**slow.spec, "only_here": 3}
    (row,) = [each for each in settings_of([slow, fast], alice) if each.name == "Only here"]
    assert (row.values, row.differs) == (("3", "\N{EM DASH}"), True)


def test_ranks_are_compared_by_what_each_holds(monkeypatch):
    jobs = [Job(kind="train", spec={"parallel": {"processes_per_host": 2}}) for _ in range(2)]
    held = {id(jobs[0]): 200.0, id(jobs[1]): 100.0}

    def story(job):
        rows = [
            TermRow("optimizer_states", "Optimiser states", 150.0, held[id(job)]),
            TermRow("activations", "Activations", 50.0, 60.0, is_rest=True),
        ]
        return SimpleNamespace(rows=tuple(rows))

    monkeypatch.setattr(comparing, "story_of", story)

    (row,) = comparing._rank_rows([Side(at + 1, job, "") for at, job in enumerate(jobs)])

    assert row.label == "Optimiser states on a rank"
    assert [cell.measured for cell in row.cells] == [200.0, 100.0]
    assert row.cells[1].against_first.endswith("50 %")
    assert row.cells[1].ratio == pytest.approx(100 / 150)


def test_one_process_beside_several_has_no_rows_of_a_rank():
    alone, shared = Job(kind="train", spec={}), Job(kind="train", spec={}, devices_per_host=2)
    assert comparing._rank_rows([Side(1, alone, ""), Side(2, shared, "")]) == []


def stepping(
    make_run, name: str, start_ms: int, paces: list[int], steps: list[int] | None = None
) -> Job:
    """Return a run that began its steps some ms after its memory was first measured."""
    numbers = steps or [at + 1 for at, _ in enumerate(paces)]
    job = make_run(name, 1.0, 4, points=0)
    memory = [Point(1, 0, "host", {"rss_bytes": 1.0})]
    losses = [
        Point(1001 + at, start_ms + t, "job", {"loss": 8.0 - at, "step": float(numbers[at])})
        for at, t in enumerate(paces)
    ]
    append(job.current_attempt_id, [*memory, *losses])
    return job


def test_a_line_that_resumed_from_an_earlier_step_ends_at_its_highest(make_run):
    ordinary = stepping(make_run, "Ordinary", 0, [0, 1000])
    resumed = stepping(make_run, "Resumed", 0, [0, 1000, 2000, 3000, 4000], [4, 5, 6, 2, 3])
    jobs = [ordinary, resumed]
    drawn = [draw(job, has_step=True) for job in jobs]
    (loss,) = [each for each in overlays(sides_of(jobs), drawn) if each.chart.key == "loss"]
    assert loss.figure["layout"]["xaxis"]["range"] == [1, 6]
    assert [cells[1] != "" for _, cells in loss.twin][-2:] == [True, True]


def test_losses_lie_over_each_other_by_step_however_late_and_slow_a_run_was(make_run, alice):
    late = stepping(make_run, "Late", 60_000, [0, 1000, 2000, 3000])
    slow = stepping(make_run, "Slow", 5_000, [0, 9000, 18_000])
    shown = page(alice, late, slow)
    assert "Over the step" in shown
    assert "axis=time#charts-title" in shown

    jobs, found = [late, slow], {}
    for axis in ("", "time"):
        drawn = [draw(job, has_step=True) for job in jobs]
        (loss,) = [
            each for each in overlays(sides_of(jobs), drawn, axis) if each.chart.key == "loss"
        ]
        lines = [trace for trace in loss.figure["data"] if trace["mode"] == "lines+text"]
        found[axis] = [trace["x"] for trace in lines]
    assert found[""] == [[1, 2, 3, 4], [1, 2, 3]]
    origin = ORIGIN_MS
    assert found["time"] == [
        [origin, origin + 1_000, origin + 2_000, origin + 3_000],
        [origin, origin + 9_000, origin + 18_000],
    ]
    shown = page(alice, late, slow, more="&axis=time")
    assert "Over the time since first step" in shown
    assert ">Memory" not in shown.partition("charts-title")[2]  # measured before the first step
    assert get(alice, late, slow, more="&axis=epoch").status_code == 400


def test_without_steps_of_every_job_they_are_over_time_with_no_switch(make_run, slow, alice):
    stepped = stepping(make_run, "Steps", 0, [0, 1000, 2000])
    shown = page(alice, stepped, slow)
    assert "Over the time since start" in shown
    assert "axis=step" not in shown


def test_a_metric_of_which_each_job_has_one_value_is_a_figure_without_axes(make_run, alice):
    jobs = [make_run(name, 1.0, 4, points=1) for name in ("One", "Other")]
    shown = page(alice, *jobs).partition("charts-title")[2]
    assert "Training loss, one value each" in shown
    assert 'data-chart="loss"' not in shown
