"""The quick answer: the first plan of the whole search, and nothing that takes longer."""

import pytest

from planner import api
from planner.search.scoring import ESTIMATES
from planner.specs.estimate import PlanRequest
from tests.planner.asking import SERVE, TRAIN, document

ONE_CARD = {"device": "rtx-4090"}
LATE = {"constraints": {"tpot_seconds": {"max": 1e-9}}}
ASKED = {
    "met": {"workload": SERVE},
    "met at a percentile": {
        "workload": SERVE,
        "constraints": {"ttft_p95_seconds": {"max": 60.0}},
    },
    "a target that only some plans meet": {
        "workload": SERVE,
        "constraints": {"tpot_p99_seconds": {"max": 0.02}},
    },
    "missed": {"workload": SERVE, **LATE},
    "too large": {"workload": SERVE, "model": "meta-llama/Llama-3.1-70B", "cluster": ONE_CARD},
    "too large and missed": {
        "workload": SERVE, "model": "meta-llama/Llama-3.1-70B", "cluster": ONE_CARD, **LATE,
    },
    "trained": {"workload": TRAIN},
    "compressed": {"workload": {"kind": "compress", "method": "gptq"}},
}  # fmt: skip


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)
def test_it_is_the_first_plan_of_the_whole_answer(fields):
    request = PlanRequest.model_validate(document(**fields))
    ESTIMATES.forget()
    quick = api.best_plan(request)
    ESTIMATES.forget()
    whole = api.plan(request)
    answered = request if whole.plans else request.without_targets()
    whole = whole if whole.plans else api.plan(answered)

    assert quick.plans == whole.plans[:1]
    assert quick.searched.strategies == whole.searched.strategies
    assert quick.request == answered
    assert quick.rejected == ({} if quick.plans else whole.rejected)
    assert (quick.pareto, quick.suggestions) == ((), ())
