"""Plans of alice's team, made as the wizard makes them."""

import pytest

from runners.plans.document import PLANS
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.wizard.drafts import demo_document, goal_change, serve_document, stored_draft

SMALL = {"source": "catalog", "catalog_id": "HuggingFaceTB/SmolLM2-135M"}
SOURCES = {
    "demo": {"source": "demo"},
    "catalog": SMALL,
    "config": {"source": "config", "config": demo_config()},
    "folder": {"source": "folder", "path": "tiny", "config": demo_config()},
    "team": {"source": "team"},
}


@pytest.fixture
def demo_plan(team, alice, host) -> Plan:
    return Plan.objects.create(
        team=team, owner=alice, name="demo", draft=stored_draft(demo_document(host))
    )


@pytest.fixture
def serve_plan(team, alice, host) -> Plan:
    draft = stored_draft(serve_document(host))
    draft["model"] = {"source": "demo", "catalog_id": "meta-llama/Llama-3.1-8B"}
    return Plan.objects.create(team=team, owner=alice, name="serve", draft=draft)


@pytest.fixture
def trained(team, host) -> TeamModel:
    """A model that a job left on the host."""
    return TeamModel.objects.create(
        team=team,
        name="trained demo",
        source="job",
        config=demo_config(),
        host=host,
        attempt_id="01H" + "A" * 23,
        artefact_name="model",
    )


def with_model(plan: Plan, model: TeamModel, goal: str) -> Plan:
    """The plan with a model of the team and another goal."""
    plan.draft["model"] |= {"source": "team", "team_model": model.pk}
    goal_change(plan, goal)
    plan.save()
    return plan


@pytest.fixture
def plan_of(team, alice, host, trained):
    """Return plans like the demo's with another goal, model and values of its workload."""

    def make(goal: str, source: str, **values) -> Plan:
        chosen = SOURCES[source] | ({"team_model": trained.pk} if source == "team" else {})
        usual = {
            "finetune": {"method": "full", "sequence_length": 256},
            "serve": {"input_tokens": 128, "output_tokens": 64},
            "generate": {"input_tokens": 128, "output_tokens": 64},
        }
        document = PLANS[goal](
            goal=goal,
            model={"catalog_id": SMALL["catalog_id"], **chosen},
            workload={**usual.get(goal, {}), **values},
            hardware={"host": host.pk},
        )
        draft = stored_draft(document, "demo")
        return Plan.objects.create(team=team, owner=alice, name="demo", draft=draft)

    return make
