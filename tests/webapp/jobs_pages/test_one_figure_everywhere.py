"""Each figure of each job is equal on card, caption, table, compare, export and API.

A site with a running and a finished job of every kind is generated; the points of a job and its
result disagree on purpose, as do the original and the compressed model of a compression.
"""

import csv
import html
import io
import re
import statistics
from collections.abc import Iterator

import pytest
from django.test import Client

from runners.jobspec.compress import ORIGINAL, SAVED
from tests.plugins.extent import sample
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, make_job
from webapp.agents.ingest import events_accept
from webapp.charts.plots import BY_KIND
from webapp.core.display import number, quantity
from webapp.core.figures import REGISTRY, definition_of
from webapp.jobs.compression_effect import before_after
from webapp.jobs.job_charts import draw
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Attempt, Job
from webapp.jobs.progress import KIND_WORDS
from webapp.jobs.services import job_submit
from webapp.pages.plans import measured_of
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")
MIB = 2.0**20
POINTS = 30
PRICED = {name for name, each in REGISTRY.items() if "prices" in each.default.words}
COMPUTED = {"run_seconds", "host_memory_bytes", "device_memory_bytes", "mfu", *PRICED}
TAGS = re.compile(r"<[^>]+>")


def size_of(name: str) -> float:
    """Return a plausible value of a figure, another one for each."""
    position = list(REGISTRY).index(name.removeprefix("original_")) + 1
    scale = {"bytes": MIB, "share": 0.001}.get(definition_of(name).unit, 1.0)
    return scale * (100 + 7 * position) * (3.0 if name.startswith("original_") else 1.0)


def names_of(kind: str) -> list[str]:
    """Return what a job of a kind reports in its result."""
    names = [name for name in REGISTRY if name not in COMPUTED]
    originals = [f"original_{name}" for name in names] if kind == "compress" else []
    return [*names, *originals]


def prediction_of(kind: str) -> dict[str, dict]:
    said = {}
    for name in names_of(kind):
        if definition_of(name).is_predicted:
            value = 1.05 * size_of(name)
            low, high = 0.9 * value, 1.1 * value
            said[name] = {"value": value, "low": low, "high": high, "unit": ""}
    return said | ({"mfu": {"value": 0.4, "low": 0.3, "high": 0.5}} if kind == "train" else {})


def points_of(kind: str, *, prefix: str = "") -> Iterator[tuple[str, dict]]:
    """Yield what a job reports while it runs: other values than in its result."""
    takings = {name: each.taking(kind) for name, each in REGISTRY.items()}
    series = {taking.series: name for name, taking in takings.items() if taking.series}
    for sampled in ("gpu", "rss_bytes"):
        series.pop(sampled, None)
    factor = 3.0 if prefix else 1.0
    for step in range(1, POINTS + 1):
        wave = factor * (0.9 + 0.002 * step)
        values = {f"{prefix}{name}": wave * size_of(of) for name, of in series.items()}
        extra = {"answered_requests": 10.0 * step} if kind == "serve" else {}
        yield ("metric", {"source": "job", "values": values | extra, "step": step})
        sample = {"rss_bytes": 900 * MIB + step * MIB}
        yield ("metric", {"source": "host", "values": sample})


def events_of(kind: str, *, is_old_agent: bool) -> Iterator[tuple[str, dict]]:
    yield ("started", STARTED)
    if kind == "compress":
        yield ("phase", {"name": ORIGINAL})
        if is_old_agent:  # both models under one name
            yield from points_of(kind)
        else:
            yield from points_of(kind, prefix="original_")
        yield ("phase", {"name": SAVED})
    else:
        phases = [each.taking(kind).phase for each in REGISTRY.values()]
        yield ("phase", {"name": next((phase for phase in phases if phase), "Working")})
    yield from points_of(kind)


def generated(team, owner, host, kind: str, *, is_over: bool, is_old_agent: bool = False) -> Job:
    """Return a job of a kind that reported points, and its result if it is over."""
    plan = Plan.objects.create(team=team, owner=owner, name=f"plan of {kind}", draft={})
    job = make_job(team, owner, host, name=f"a {kind} job", prediction=prediction_of(kind))
    job_submit(job=job, by=owner.username)
    attempt = Attempt.objects.get(job=job)
    claim(attempt)
    attempt.allocations.all().delete()
    Job.objects.filter(pk=job.pk).update(kind=kind, plan=plan, spec={"kind": kind})
    events = list(events_of(kind, is_old_agent=is_old_agent))
    if is_over:
        measured = {name: size_of(name) for name in names_of(kind)}
        record = {**EXIT_OK, "peak_rss_bytes": int(960 * MIB)}
        events += [("result", {"measured": measured, "notes": {}}), ("exited", record)]
    for first in range(0, len(events), 50):
        part = batch_of(attempt, *events[first : first + 50], first=first + 1)
        events_accept(host=attempt.host, batch=part)
    return Job.objects.get(pk=job.pk)


# What each place says, by the figure's label


def text(piece: str) -> str:
    spaced = piece.replace('<span class="unit">', " ")
    return " ".join(html.unescape(TAGS.sub("", spaced)).split())


def cards(page: str) -> dict[str, str]:
    found = re.findall(r"<dt>(.*?)</dt>\s*<dd class=\"value\">(.*?)</dd>", page, re.DOTALL)
    return {text(label): text(value) for label, value in found}


def table(page: str) -> dict[str, tuple[str, str]]:
    rows = re.findall(r'<tr data-figure="[^"]*">(.*?)</tr>', page, re.DOTALL)
    cells = [
        [text(cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)] for row in rows
    ]
    return {row[0]: (row[3], row[4]) for row in cells}


def captions(page: str) -> list[str]:
    found = re.findall(r'data-region="words-[^"]*">(.*?)</', page, re.DOTALL)
    return [text(words) for words in found]


def compared(page: str) -> dict[str, list[str]]:
    section = page.split('id="figures-title"')[1].split("</section>", maxsplit=1)[0]
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', section, re.DOTALL)
    value = re.compile(r"<strong>(.*?)</strong><span class=\"unit\">(.*?)</span>")
    found = {}
    for label, cells in rows:
        parts = re.findall(r"<td.*?>(.*?)</td>", cells, re.DOTALL)
        hits = [value.search(part) for part in parts]
        found[text(label)] = [text(f"{hit[1]} {hit[2]}") if hit else "" for hit in hits]
    return found


def shown(label: str, raw: float | None) -> str:
    """Return a raw value as pages print it."""
    registered = label.removesuffix(" of steps")  # a training's speed
    unit = next((each.unit for each in UNITS if each.label == registered), "")
    return "" if raw is None else text(str(quantity(raw, unit)))


UNITS = [*REGISTRY.values(), *(definition_of(f"original_{name}") for name in REGISTRY)]


def everywhere(client: Client, job: Job, other: Job) -> dict[str, dict[str, str]]:
    """Return what each place says of each figure, as printed there or as it would be printed."""
    page = client.get(f"/jobs/{job.pk}/").content.decode()
    partial = client.get(f"/jobs/{job.pk}/", headers={"HX-Request": "true"}).content.decode()
    beside = client.get(f"/compare/?job={job.pk}&job={other.pk}").content.decode()
    api = client.get(f"/api/v1/jobs/{job.pk}/figures").json()["figures"]
    as_json = client.get(f"/jobs/{job.pk}/figures.json").json()["figures"]
    sheet = client.get(f"/jobs/{job.pk}/figures.csv").content.decode()
    rows = list(csv.DictReader(io.StringIO(sheet)))
    return {
        "card": cards(page),
        "card of a refreshed page": cards(partial),
        "table": {label: measured for label, (measured, _) in table(page).items()},
        "compare": {label: values[0] for label, values in compared(beside).items()},
        "API": {each["label"]: shown(each["label"], each["measured"]) for each in api},
        "JSON": {each["label"]: shown(each["label"], each["measured"]) for each in as_json},
        "CSV": {
            row["label"]: shown(row["label"], float(row["measured"]) if row["measured"] else None)
            for row in rows
        },
    }


@pytest.fixture
def site(team, alice, host):
    """Return a maker of jobs of one kind: the running one and the finished one."""

    def make(kind: str, *, is_old_agent: bool = False) -> dict[str, Job]:
        return {
            word: generated(
                team, alice, host, kind, is_over=word == "finished", is_old_agent=is_old_agent
            )
            for word in ("running", "finished")
        }

    return make


def each_figure_is_equal_wherever_it_stands(client: Client, jobs: dict[str, Job]) -> None:
    told = 0
    for word, job in jobs.items():
        other = jobs["finished" if word == "running" else "running"]
        places = everywhere(client, job, other)
        api = places["API"]
        for place, figures in places.items():
            for label, value in figures.items():
                if label == "Run time" or label not in api or not api[label]:
                    continue  # it grows between two requests
                assert value == api[label], (word, place, label)
                told += 1
        assert set(api) - {"Run time"} >= set(places["card"])
    assert told > 0


def each_caption_says_the_figure_that_its_card_shows(
    client: Client, kind: str, jobs: dict[str, Job]
) -> None:
    charts = {name for each in BY_KIND[kind] for name in each.figures}
    for job in jobs.values():
        for tab in ("", "metrics/"):
            page = client.get(f"/jobs/{job.pk}/{tab}").content.decode()
            api = client.get(f"/api/v1/jobs/{job.pk}/figures").json()["figures"]
            words = captions(page)
            for each in api:
                if each["name"] in charts and each["measured"] is not None:
                    said = f"{each['label']} {shown(each['label'], each['measured'])}"
                    assert any(said in one for one in words), (job.state, tab, said)


def the_ratio_of_the_list_and_of_the_plan_is_that_of_the_table(client: Client, job: Job) -> None:
    page = client.get(f"/jobs/{job.pk}/").content.decode()
    ratios = {label: ratio for label, (_, ratio) in table(page).items()}
    of_plan = {met.metric: (str(met.measured), met.ratio) for met in measured_of(job.plan)}
    measured = {label: value for label, (value, _) in table(page).items()}

    listed = text(client.get("/jobs/").content.decode())

    for label, (value, ratio) in of_plan.items():
        if label in measured:
            assert text(value) == measured[label]
            assert number(ratio) == ratios[label]
    for label in ("Tokens per second", "Tokens per second of steps"):
        assert label not in of_plan or ratios[label] in listed


def no_figure_is_one_of_an_original(jobs: dict[str, Job]) -> None:
    for job in jobs.values():
        found = figures_of(job)
        assert [name for name in found if name.startswith("original_")] == []
        assert before_after(found) == []


def the_two_models_are_never_one_line_or_one_median(job: Job, *, is_old_agent: bool) -> None:
    found = figures_of(job)
    lines = {each.chart.metric: each.series for each in draw(job)}
    for name in ("decode_tokens_per_second", "prefill_tokens_per_second"):
        before, after = found[f"original_{name}"], found[name]
        assert len(lines[name].known) == len(lines[f"original_{name}"].known) == POINTS
        assert max(lines[name].known) < (1.0 if is_old_agent else 0.5) * 3 * size_of(name)
        assert before.measured == statistics.median(lines[f"original_{name}"].known)
        assert after.measured == statistics.median(lines[name].known)


@pytest.mark.parametrize("kind", sample(KIND_WORDS, share=0.4))
def test_the_figures_of_every_kind_are_equal_wherever_they_stand(as_alice, site, kind):
    jobs = site(kind)
    each_figure_is_equal_wherever_it_stands(as_alice, jobs)
    each_caption_says_the_figure_that_its_card_shows(as_alice, kind, jobs)
    the_ratio_of_the_list_and_of_the_plan_is_that_of_the_table(as_alice, jobs["finished"])
    if kind == "compress":
        the_two_models_are_never_one_line_or_one_median(jobs["running"], is_old_agent=False)
    else:
        no_figure_is_one_of_an_original(jobs)


def test_an_old_agent_that_reports_both_models_under_one_name_is_told_apart(as_alice, site):
    jobs = site("compress", is_old_agent=True)
    each_figure_is_equal_wherever_it_stands(as_alice, jobs)
    the_two_models_are_never_one_line_or_one_median(jobs["running"], is_old_agent=True)
