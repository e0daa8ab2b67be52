"""Joules and money on a job's page: measured beside predicted, with the prices of its host."""

import re
from datetime import timedelta

import pytest

from webapp.core.clock import now
from webapp.hosts.device import price_of
from webapp.jobs.measured_figures import costs_of
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")

DRAWN = {
    "gpu0_energy_joules": 5000.0,
    "package_0_energy_joules": 2200.0,
    "energy_joules": 7200.0,
    "energy_joules_per_token": 0.5,
    "tokens_per_second": 1000.0,
}
HOW = {"energy_joules_per_token": "10000 tokens in Training: gpu0 by NVML"}
SAID = {"value": 0.4, "low": 0.3, "high": 0.6, "unit": "joules_per_token"}


@pytest.fixture
def draft(draft) -> Job:
    draft.prediction = draft.prediction | {"energy_joules_per_token": SAID}
    draft.save()
    return draft


@pytest.fixture
def priced(running, report) -> Job:
    """A job that ended on a host whose labels state two prices, and said what it drew."""
    running.host.labels = {"usd_per_kwh": "0.36", "usd_per_hour": "1.80"}
    running.host.save()
    report(("result", {"measured": DRAWN, "notes": HOW}))
    at = now()
    Job.objects.filter(pk=running.pk).update(
        state="succeeded", started_at=at - timedelta(seconds=60), ended_at=at
    )
    return Job.objects.get(pk=running.pk)


def words(client, job: Job) -> str:
    text = re.sub(r"<[^>]+>", " ", client.get(f"/jobs/{job.pk}/").content.decode())
    return re.sub(r"\s+", " ", text.replace("\N{NO-BREAK SPACE}", " "))


def test_joules_stand_beside_the_planners_with_sensor_and_each_device(as_alice, priced):
    text = words(as_alice, priced)

    assert "Energy per token 0.500 J/token" in text
    assert "measured · predicted 0.400 J/token" in text
    assert "Energy of gpu0" in text
    assert "Energy of package_0" in text
    assert HOW["energy_joules_per_token"] in text


def test_money_is_what_was_measured_at_the_prices_that_the_hosts_labels_state(priced):
    costs = costs_of(priced)

    assert costs["run_electricity_usd"].usd == pytest.approx(7200 / 3.6e6 * 0.36)
    assert costs["electricity_usd_per_million_tokens"].usd == pytest.approx(0.5e6 / 3.6e6 * 0.36)
    assert costs["run_cost_usd"].usd == pytest.approx(1.80 / 60)
    assert costs["cost_usd_per_million_tokens"].usd == pytest.approx(1.80 / 3600 / 1000 * 1e6)
    assert costs["run_cost_usd"].how == "from start to end at $1.8 an hour, label of Box"
    priced.num_hosts = 2
    assert costs_of(priced) == {}


def test_a_job_on_a_host_without_a_price_shows_joules_and_no_money(as_alice, priced):
    priced.host.labels = {"usd_per_kwh": "cheap", "usd_per_hour": "-1"}
    priced.host.save()

    text = words(as_alice, priced)

    assert price_of(priced.host.labels, "usd_per_kwh") is None
    assert "Energy of the run 7.20 kJ" in text
    assert "$" not in text.partition("Predicted against measured")[2].partition("Log")[0]


def test_a_job_that_no_sensor_saw_says_why(as_alice, running, report):
    why = "not measured: this host has no power sensor: no RAPL counter"
    report(("result", {"measured": {"perplexity": 9.0}, "notes": {"energy_joules": why}}))

    text = words(as_alice, running)

    assert f"Energy: {why}." in text
    assert "Energy of the run" not in text
