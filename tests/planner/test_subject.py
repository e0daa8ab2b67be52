"""What a process remembers of its last questions changes how fast it answers, never what."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from planner.search import engine, subject
from planner.search.question import questions
from planner.search.subject import RECENT, Recent, Subject
from planner.specs.plan import PlanRequest
from planner.specs.strategy import Strategy
from tests.planner.asking import SERVE, TRAIN, document

OPEN = {**SERVE, "concurrency": None, "request_rate_per_second": 2.0}
TAIL = {"ttft_p99_seconds": {"max": 0.2}}
NEXT = {
    "another objective": {"objective": "latency"},
    "a frugal objective": {"objective": "cost"},
    "a pin": {"pins": {"weight_dtype": "bf16"}},
    "a target": {"constraints": {"tpot_seconds": {"max": 0.02}}},
    "a target on a percentile": {"constraints": TAIL},
    "a target out of reach": {"constraints": {"tpot_seconds": {"max": 1e-9}}},
    "fewer plans": {"top": 1},
    "a name": {"id": "second"},
}


@pytest.fixture(autouse=True)
def _nothing_remembered():
    RECENT.forget()
    yield
    RECENT.forget()


def asked(**fields):
    return PlanRequest.model_validate(document(**{"engine": "vllm", **fields}))


def told(request):
    """Return an answer as a document without the time that it took."""
    answer = engine.search(request).model_dump(mode="json")
    del answer["searched"]["seconds"]
    return answer


def question(**fields):
    return next(questions(asked(**fields)))


@pytest.mark.parametrize("load", [SERVE, OPEN], ids=["closed", "open"])
@pytest.mark.parametrize("change", NEXT)
def test_an_answer_is_the_same_whatever_was_asked_before(change, load):
    request = asked(workload=load, **NEXT[change])
    alone = told(request)

    for before in NEXT.values():
        engine.search(asked(workload=load, **before))

    assert told(request) == alone


@pytest.mark.parametrize("change", ["another objective", "a pin"])
def test_training_is_answered_alike_after_other_questions(change):
    request = asked(workload=TRAIN, engine="megatron", devices=8, **NEXT[change])
    alone = told(request)

    engine.search(asked(workload=TRAIN, engine="megatron", devices=8))

    assert told(request) == alone


@pytest.mark.parametrize("change", ["another objective", "a target", "fewer plans"])
def test_strategies_are_not_scored_again_for_another_target_or_objective(change, monkeypatch):
    engine.search(asked())
    monkeypatch.setattr(engine, "score", None)

    assert engine.search(asked(**NEXT[change])).plans


def test_estimates_are_not_made_again_for_a_pin(monkeypatch):
    engine.search(asked(top=1))
    monkeypatch.setattr(subject, "estimate_request", None)

    assert engine.search(asked(top=1, pins={"weight_dtype": "fp8"})).pareto


def test_a_simulated_percentile_is_shown_only_to_who_asked_for_it():
    engine.search(asked(constraints=TAIL))

    frontier = engine.search(asked()).pareto

    assert all(plan.performance.ttft_p99_seconds is None for plan in frontier)


def test_questions_of_several_people_at_once_are_answered_alike():
    requests = [asked(objective=name) for name in ("latency", "throughput", "cost")] * 3
    alone = [told(request) for request in requests]
    RECENT.forget()

    with ThreadPoolExecutor(4) as people:
        assert list(people.map(told, requests)) == alone


@pytest.mark.parametrize(
    "changed",
    [
        {"workload": {**SERVE, "concurrency": 17}},
        {"devices": 2},
        {"device": "h200-sxm-141gb"},
        {"model": "meta-llama/Llama-3.1-70B"},
        {"engine": "sglang"},
        {"id": "second"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_an_estimate_reads_makes_another_subject(changed):
    recent = Recent()

    assert recent.of(question(**changed)) is not recent.of(question())


@pytest.mark.parametrize("changed", ["another objective", "a target", "a pin", "fewer plans"])
def test_what_no_estimate_reads_leaves_the_subject_as_it_is(changed):
    recent = Recent()

    assert recent.of(question(**NEXT[changed])) is recent.of(question())


def test_only_the_latest_subjects_are_remembered(monkeypatch):
    monkeypatch.setattr(subject, "MAX_SUBJECTS", 2)
    recent = Recent()

    first, second, _ = (recent.of(question(id=name)) for name in ("a", "b", "a"))
    recent.of(question(id="c"))

    assert first in recent.subjects
    assert second not in recent.subjects


def test_a_space_larger_than_all_that_is_kept_is_not_kept(monkeypatch):
    monkeypatch.setattr(subject, "MAX_STRATEGIES", 5)

    engine.search(asked())

    assert [one.strategies for one in RECENT.subjects] == [0]


def test_the_oldest_subjects_go_when_too_many_strategies_are_kept(monkeypatch):
    monkeypatch.setattr(subject, "MAX_STRATEGIES", 50)

    for callers in (1, 2, 3):
        engine.search(asked(workload={**SERVE, "concurrency": callers}))

    assert sum(one.strategies for one in RECENT.subjects) <= 50
    assert RECENT.subjects[-1].key[0].concurrency == 3


def test_a_subject_keeps_only_so_many_estimates_and_costs_the_others_anew(monkeypatch):
    monkeypatch.setattr(subject, "MAX_ESTIMATES", 1)
    one, ways = Subject(), [Strategy(weight_dtype=dtype) for dtype in ("bf16", "fp8")]

    found = [one.exact(question(), way) for way in (*ways, *ways)]

    assert list(one.plain) == ways[:1]
    assert found[:2] == found[2:]
