"""Every option of a launch is on a review page, and in the clone of a job launched with it."""

import re
from typing import get_args

import pytest

from runners.jobspec import ArtefactModel
from runners.jobspec.base import SchedulerOption
from runners.plans.launch import USED_BY, Launch
from runners.shared.facts import GpuFacts
from tests.webapp.conftest import client_of
from webapp.accounts.secrets import secret_store
from webapp.jobs.artefacts import adapters_of, producer_of
from webapp.jobs.launching import launch_of_job, plan_launch
from webapp.jobs.models import Artefact, Attempt
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute

pytestmark = pytest.mark.django_db(databases="__all__")
OF_SAVING = {"name", "save_as"}  # of the plan that is saved, not of the job
OF_SCHEDULER = {
    *get_args(SchedulerOption)
}  # of a host with a scheduler: tests/webapp/plans/test_sharing.py
ANY = {
    "max_duration_seconds": 7200.0,
    "max_retries": 2,
    "priority": "low",
    "shared": True,
    "secrets": ["HF_TOKEN"],
}
ENDPOINT = {"run": "endpoint", "engine": "vllm", "idle_stop_seconds": 90.0}
LOAD = {"arrivals": "open", "points": [2.0, 4.0], "requests_per_repetition": 8, "repetitions": 2}
TRACKED = {
    "tracker": "mlflow", "tracker_project": "lab", "tracker_run": "first",
    "tracker_url": "http://127.0.0.1:5000",
}  # fmt: skip
CASES = [
    ("pretrain", ANY),
    ("finetune", ANY),
    ("finetune", TRACKED),
    ("compress", ANY),
    ("generate", {**ANY, "adapter": "ADAPTER"}),
    ("generate", {"adapter": "all"}),
    ("generate", {"draft_model": "MODEL"}),
    ("generate", {**ANY, "run": "evaluation", "original": "acme/tiny"}),
    ("serve", {**ANY, "profile": True}),
    ("catalog serve", {"weights": "random"}),
    ("catalog generate", {"weights": "random"}),
    ("serve", {**ANY, **ENDPOINT, "prefix_caching": False, "draft_model": "lookup"}),
    ("serve", {**ENDPOINT, "prefix_caching": True, "draft_model": "MODEL"}),
    ("serve", {**ENDPOINT, "adapters": True}),
    ("serve", {**ENDPOINT, "engine_args": ["--stream-interval", "4"]}),
    ("serve", {**ANY, "run": "load", **LOAD}),
    ("serve", {"run": "load", "levels": "search", "max_search_seconds": 1800.0}),
]


@pytest.fixture
def place(plan_of, trained, team, host, alice) -> dict[str, str]:
    """Give the host a GPU, the model adapters and a smaller sibling, and the team a secret."""
    gpu = GpuFacts(index=0, uuid="GPU-0", name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30)
    host.facts["gpus"] = [gpu.model_dump(mode="json")]
    host.save()
    secret_store(team=team, by=alice, name="HF_TOKEN", value="hf_secretvalue")
    small = TeamModel.objects.create(
        team=team,
        name="small one",
        source="job",
        config=demo_config() | {"num_hidden_layers": 1},
        host=host,
        attempt_id="01H" + "B" * 23,
        artefact_name="model",
    )
    job = plan_launch(plan=plan_of("serve", "team"), by=alice)
    base = {"source": "artefact", "attempt_id": trained.attempt_id, "name": "model"}
    for number in (2, 3):
        attempt = Attempt.objects.create(job=job, host=host, number=number)
        Artefact.objects.create(
            attempt=attempt, name="adapter", kind="adapter", total_bytes=1, facts={"base": base}
        )
    model = ArtefactModel(attempt_id=trained.attempt_id)
    return {
        "MODEL": str(small.pk),
        "ADAPTER": adapters_of(team, model, producer_of(model))[0].name,
    }


def plan_for(name: str, plan_of, demo_plan) -> Plan:
    source, _, goal = name.rpartition(" ")
    plan = demo_plan if goal == "pretrain" else plan_of(goal, source or "team")
    plan_compute(plan)
    return plan


def test_every_option_of_a_launch_is_one_of_the_cases():
    given = {name for _, options in CASES for name in options}
    assert given == Launch.model_fields.keys() - OF_SAVING - OF_SCHEDULER
    assert USED_BY.keys() <= given


def test_each_option_is_on_the_review_page_of_its_goal_and_in_the_clone_of_its_job(
    place, plan_of, demo_plan, alice
):
    for goal, options in CASES:
        case = (goal, options)
        plan = plan_for(goal, plan_of, demo_plan)
        launch = Launch(**{key: place.get(str(one), one) for key, one in options.items()})
        page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
        shown = set(re.findall(r'name="(\w+)"', page))
        assert options.keys() <= shown, (case, options.keys() - shown)
        assert launch_of_job(plan_launch(plan=plan, by=alice, launch=launch)) == launch, case
