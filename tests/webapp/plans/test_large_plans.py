"""Plans on many devices stay readable: stages, axes, the evidence behind each figure."""

import pytest

from planner.api import plan
from planner.specs.estimate import PlanRequest
from tests.webapp.conftest import client_of
from tests.webapp.plans.test_verdict_words import NODE
from webapp.plans.alternatives import _short
from webapp.plans.models import Plan
from webapp.plans.verdict import MAX_ROWS, memory_rows, memory_words, verdict_of
from webapp.wizard.drafts import serve_draft

LLAMA_405B = "meta-llama/Llama-3.1-405B"
PRETRAIN = {"kind": "train", "sequence_length": 8192, "global_batch_size": 1024, "method": "pretrain"}
MANY = {"kind": "serve", "input_tokens": 1024, "output_tokens": 256, "concurrency": 64}
WIDE = {"tensor_parallel_size": 8, "pipeline_parallel_size": 1}


def answered(workload, **fields):
    base = {"model": "meta-llama/Llama-3.1-70B", "cluster": NODE, "workload": workload}
    return plan(PlanRequest.model_validate({**base, **fields}))


def trained(stages):
    pins = {"pipeline_parallel_size": stages, "tensor_parallel_size": 8}
    cluster = {**NODE, "nodes": 128}
    return answered(PRETRAIN, model=LLAMA_405B, cluster=cluster, pins=pins, top=1).plans[0]


def test_sixteen_stages_are_drawn_the_fullest_is_named_and_further_ones_are_said():
    best = trained(16)
    assert [row.label for row in memory_rows(best)] == [f"Stage {at}" for at in range(16)]
    peaks = best.memory.per_stage_peak_bytes
    assert f"Stage {peaks.index(max(peaks))} is the fullest." in memory_words(best)
    assert memory_words(best).startswith("64 devices a stage.")

    best = trained(32)
    assert len(memory_rows(best)) == MAX_ROWS
    assert "16 further stages take at most " in memory_words(best)


def test_many_devices_alike_are_one_bar_and_a_few_a_bar_each():
    best = answered(MANY, cluster={**NODE, "nodes": 2}, pins=WIDE).plans[0]
    assert [row.label for row in memory_rows(best)] == ["Each"]
    assert memory_words(best) == "The same on each of 16 devices."

    best = answered(MANY, pins=WIDE).plans[0]
    assert len(memory_rows(best)) == 8
    assert memory_words(best) == ""


def test_the_terms_beside_the_bars_are_those_of_the_fullest_one():
    draft = serve_draft(None)
    draft["goal"]["goal"] = "pretrain"
    found = verdict_of(answered(PRETRAIN, model=LLAMA_405B, cluster={**NODE, "nodes": 128}), draft)
    assert found.fullest.total_bytes == max(row.total_bytes for row in found.rows)


def test_a_label_beside_an_axis_is_short():
    for value, label in [
        (0, "0"),
        (40, "40"),
        (2500, "2\u202f500"),
        (200_000, "200k"),
        (1_500_000, "1.50M"),
    ]:
        assert _short(value) == label, value


@pytest.mark.django_db
def test_a_figure_links_to_its_equation_and_to_how_far_such_figures_are_off(team, alice):
    kept = Plan.objects.create(team=team, owner=alice, draft=serve_draft(None))
    page = client_of(alice).get(f"/plans/{kept.pk}/").content.decode()
    assert f'class="prov modelled" href="/plans/{kept.pk}/why/"' in page
    assert '<a href="/docs/accuracy">' in page
