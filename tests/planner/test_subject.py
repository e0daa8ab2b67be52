"""What a process remembers of its last questions changes how fast it answers, never what."""

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

from planner.search import engine, scoring
from planner.search.question import questions
from planner.search.scoring import ESTIMATES, EstimateCache, Subject
from planner.specs.estimate import PlanRequest
from planner.specs.workload import Strategy
from planner.workload import costing, under_load
from planner.workload.costing import estimate_request
from tests.planner.asking import SERVE, TRAIN, document
from tests.plugins.extent import sample

WAYS = ("exact", "with_percentiles", "explained")
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
    ESTIMATES.clear()
    yield
    ESTIMATES.clear()


def asked(**fields):
    return PlanRequest.model_validate(document(**{"engine": "vllm", **fields}))


def told(request):
    """Return an answer as a document without the time that it took."""
    answer = engine.search(request).model_dump(mode="json")
    del answer["searched"]["seconds"]
    return answer


def question(**fields):
    return next(questions(asked(**fields)))


def test_an_answer_is_the_same_whatever_was_asked_before():
    for load in (SERVE, OPEN):
        alone = {}
        changes = sample(NEXT.items(), share=0.5)
        for change, fields in changes:
            ESTIMATES.clear()
            alone[change] = told(asked(workload=load, **fields))
        for _ in range(2):  # the second time, all of them were asked before
            for change, fields in changes:
                assert told(asked(workload=load, **fields)) == alone[change], change


def test_a_look_at_what_fits_alone_leaves_the_next_search_its_reasons():
    request = asked(model="meta-llama/Llama-3.1-70B")
    alone = told(request)
    ESTIMATES.clear()
    engine.best_of(request)
    assert told(request) == alone


def test_training_is_answered_alike_after_other_questions():
    for change in ("another objective", "a pin"):
        ESTIMATES.clear()
        request = asked(workload=TRAIN, engine="megatron", devices=8, **NEXT[change])
        alone = told(request)
        engine.search(asked(workload=TRAIN, engine="megatron", devices=8))
        assert told(request) == alone, change


@pytest.mark.parametrize("change", ["another objective", "a target", "fewer plans"])
def test_strategies_are_not_scored_again_for_another_target_or_objective(change, monkeypatch):
    engine.search(asked())
    monkeypatch.setattr(engine, "score", None)
    assert engine.search(asked(**NEXT[change])).plans


def test_estimates_are_not_made_again_for_a_pin(monkeypatch):
    best = engine.search(asked(top=1, objective="cost")).plans[0]
    monkeypatch.setattr(scoring, "Costing", None)
    pins = {"weight_dtype": best.strategy.weight_dtype}
    assert engine.search(asked(top=1, objective="cost", pins=pins)).pareto


def test_a_simulated_percentile_is_shown_only_to_who_asked_for_it():
    engine.search(asked(constraints=TAIL))
    frontier = engine.search(asked()).pareto
    assert all(plan.performance.ttft_p99_seconds is None for plan in frontier)


def test_questions_of_several_people_at_once_are_answered_alike():
    requests = [asked(objective=name) for name in ("latency", "throughput", "cost")] * 3
    alone = [told(request) for request in requests]
    ESTIMATES.clear()
    with ThreadPoolExecutor(4) as people:
        assert list(people.map(told, requests)) == alone


def test_whatever_an_estimate_reads_makes_another_subject():
    for changed in (
        {"workload": {**SERVE, "concurrency": 17}}, {"devices": 2}, {"device": "h200-sxm-141gb"},
        {"model": "meta-llama/Llama-3.1-70B"}, {"engine": "sglang"}, {"id": "second"},
    ):  # fmt: skip
        recent = EstimateCache()
        assert recent.of(question(**changed)) is not recent.of(question()), changed


def test_what_no_estimate_reads_leaves_the_subject_as_it_is():
    for changed in ("another objective", "a target", "a pin", "fewer plans"):
        recent = EstimateCache()
        assert recent.of(question(**NEXT[changed])) is recent.of(question()), changed


def test_only_the_latest_subjects_are_remembered(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_SUBJECTS", 2)
    recent = EstimateCache()
    first, second, _ = (recent.of(question(id=name)) for name in ("a", "b", "a"))
    recent.of(question(id="c"))
    assert first in recent.subjects
    assert second not in recent.subjects


def test_a_space_larger_than_all_that_is_kept_is_not_kept(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_STRATEGIES", 5)
    engine.search(asked())
    assert [one.strategies for one in ESTIMATES.subjects] == [0]


def test_the_oldest_subjects_go_when_too_many_strategies_are_kept(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_STRATEGIES", 50)
    for callers in (1, 2, 3):
        engine.search(asked(workload={**SERVE, "concurrency": callers}))
    assert sum(one.strategies for one in ESTIMATES.subjects) <= 50
    assert ESTIMATES.subjects[-1].key[0].concurrency == 3


def test_a_subject_keeps_only_so_many_estimates_and_costs_the_others_anew(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_ESTIMATES", 1)
    one, ways = Subject(), [Strategy(weight_dtype=dtype) for dtype in ("bf16", "fp8")]
    found = [one.exact(question(), way) for way in (*ways, *ways)]
    assert list(one.plain) == ways[:1]
    assert found[:2] == found[2:]


@pytest.mark.parametrize("order", [*permutations(WAYS)])
def test_a_strategy_is_costed_and_simulated_once_however_much_of_it_is_asked(order, monkeypatch):
    counted = {"cost_workload": 0, "simulate": 0}

    def counting(module, name):
        work = getattr(module, name)

        def count(*args):
            counted[name] += 1
            return work(*args)

        monkeypatch.setattr(module, name, count)

    asked_of, way = question(workload=OPEN), Strategy(weight_dtype="fp8")
    request = asked_of.estimate_request(way)
    alone = {
        "exact": estimate_request(request, explain=False),
        "with_percentiles": estimate_request(request, explain=False, simulate=True),
        "explained": estimate_request(request),
    }
    counting(costing, "cost_workload")
    counting(under_load, "simulate")
    one = Subject()

    assert {name: getattr(one, name)(asked_of, way) for name in order} == alone
    assert counted == {"cost_workload": 1, "simulate": 1}


def test_only_the_latest_subjects_keep_what_estimates_are_made_of(monkeypatch):
    monkeypatch.setattr(scoring, "LATEST", 2)
    recent = EstimateCache()
    subjects = [recent.of(question(id=name)) for name in ("a", "b", "c")]
    for one in subjects:
        one.exact(question(), Strategy())
    recent.of(question(id="d"))
    assert [len(one.costings) for one in subjects] == [0, 0, 1]
    assert all(len(one.plain) == 1 for one in subjects)


def test_a_subject_keeps_the_makings_of_so_many_strategies_alone(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_COSTINGS", 1)
    one = Subject()
    for dtype in ("bf16", "fp8"):
        one.exact(question(), Strategy(weight_dtype=dtype))
    assert [way.weight_dtype for way in one.costings] == ["bf16"]
    assert len(one.plain) == 2


def test_what_ends_at_enough_is_not_kept_for_the_next_question():
    request = asked(constraints={"tokens_per_second": {"min": 1.0}})
    first = engine.explore(request, only_fitting=True, enough=bool)
    whole = engine.explore(request, only_fitting=True, enough=lambda part: not part)
    again = engine.explore(request, only_fitting=True)
    assert len(first.parts) == 1 < len(whole.parts)
    assert again.parts == whole.parts
