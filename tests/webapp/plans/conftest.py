"""Plans of alice's team, made as the wizard makes them."""

import pytest

from webapp.modelhub.demo import demo_config
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan
from webapp.wizard.defaults import demo_draft, serve_draft


@pytest.fixture
def demo_plan(team, alice, host) -> Plan:
    return Plan.objects.create(team=team, owner=alice, name="demo", draft=demo_draft(host))


@pytest.fixture
def serve_plan(team, alice, host) -> Plan:
    draft = serve_draft(host)
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
    plan.draft["goal"]["goal"] = goal
    plan.save()
    return plan
