"""The pieces of a comparison: settings made flat, lines over each other."""

from types import SimpleNamespace

import pytest

from runners.jobspec import TrainSpec
from webapp.compare import comparison
from webapp.compare.charts import overlays
from webapp.compare.comparison import Side, flat, settings_of, shown, sides_of, words_of
from webapp.jobs.memory_terms import TermRow
from webapp.jobs.models import Job
from webapp.jobs.plots import draw

pytestmark = pytest.mark.django_db(databases="__all__")


def charts_of(*jobs):
    return {
        each.chart.key: each
        for each in overlays(sides_of(list(jobs)), [draw(job) for job in jobs])
    }


def test_a_document_is_made_flat_without_what_is_empty():
    document = {"a": {"b": 1, "c": None}, "d": [], "e": False, "kind": "train"}

    assert dict(flat(document)) == {"a.b": 1, "e": False}


@pytest.mark.parametrize(
    ("value", "text"), [(True, "yes"), ((1, 2), "1, 2"), (0.5, "0.5"), ("x" * 99, "x" * 79 + "…")]
)
def test_a_value_is_shown_as_people_read_it(value, text):
    assert shown(value) == text


def test_a_path_is_read_as_words():
    assert words_of("model.config.hidden_size") == "Model · config · hidden size"


def test_what_one_job_lacks_is_a_difference(slow, fast, alice):
    slow.spec = {**slow.spec, "only_here": 3}

    (row,) = [each for each in settings_of([slow, fast], alice) if each.name == "Only here"]

    assert (row.values, row.differs) == (("3", "\N{EM DASH}"), True)


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


def test_time_counts_from_each_jobs_own_start(slow, fast):
    figure = charts_of(slow, fast)["loss"].figure
    lines = [trace for trace in figure["data"] if trace["mode"] == "lines+text"]

    assert {trace["x"][0] for trace in lines} == {figure["layout"]["xaxis"]["range"][0]}


def test_the_axis_ends_with_the_longest(make_run):
    short, long = make_run("Short", 1.0, 4, points=2), make_run("Long", 1.0, 4, points=9)

    low, high = charts_of(short, long)["loss"].figure["layout"]["xaxis"]["range"]

    assert high - low == 8000


def test_a_line_that_has_ended_leaves_its_cells_empty(make_run):
    short, long = make_run("Short", 1.0, 4, points=2), make_run("Long", 1.0, 4, points=9)

    twin = charts_of(short, long)["loss"].twin

    assert twin[-1][1][0] == ""
    assert twin[-1][1][1] != ""


def test_a_metric_that_one_job_alone_reported_is_no_comparison(slow, make_run, fast):
    silent = make_run("Silent", 1.0, 4, points=0)

    assert charts_of(slow, silent) == {}
    assert set(charts_of(slow, fast)) >= {"loss", "tokens_per_second", "memory"}


def test_every_job_has_an_ink_and_a_letter_of_its_own(slow, fast):
    lines = [
        trace
        for trace in charts_of(slow, fast)["tokens_per_second"].figure["data"]
        if trace["mode"] == "lines+text"
    ]

    assert [trace["line"]["color"] for trace in lines] == ["var(--series-1)", "var(--series-2)"]
    assert [[text for text in trace["text"] if text] for trace in lines] == [["A"], ["B"]]


def test_ranks_are_compared_by_what_each_holds(monkeypatch):
    jobs = [Job(kind="train", spec={"parallel": {"processes_per_host": 2}}) for _ in range(2)]
    held = {id(jobs[0]): 200.0, id(jobs[1]): 100.0}

    def story(job):
        rows = [
            TermRow("optimizer_states", "Optimiser states", 150.0, held[id(job)]),
            TermRow("activations", "Activations", 50.0, 60.0, is_rest=True),
        ]
        return SimpleNamespace(rows=tuple(rows))

    monkeypatch.setattr(comparison, "story_of", story)

    (row,) = comparison._rank_rows([Side(at + 1, job, "") for at, job in enumerate(jobs)])

    assert row.label == "Optimiser states on a rank"
    assert [cell.measured for cell in row.cells] == [200.0, 100.0]
    assert row.cells[1].against_first.endswith("50 %")
    assert row.cells[1].ratio == pytest.approx(100 / 150)


def test_one_process_beside_several_has_no_rows_of_a_rank():
    alone, shared = Job(kind="train", spec={}), Job(kind="train", spec={}, devices_per_host=2)

    assert comparison._rank_rows([Side(1, alone, ""), Side(2, shared, "")]) == []
