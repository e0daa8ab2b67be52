"""``manage.py drill``: only where drills are allowed, with words for whatever is wrong."""

import io

import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse

from runners.jobspec import DrillSpec
from tests.webapp.conftest import client_of, make_job
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Job


def said(*arguments: str) -> list[str]:
    out = io.StringIO()
    call_command("drill", *arguments, stdout=out)
    return out.getvalue().split()


@pytest.fixture
def allowing(settings) -> None:
    settings.ALLOWS_DRILLS = True


def test_drills_are_queued_for_the_host_and_their_ids_printed(allowing, host, olga):
    ids = said(host.slug, "--count", "2", "--steps", "3", "--ending", "oom_gpu")

    specs = [Job.objects.get(pk=pk).spec for pk in ids]
    assert [(spec["steps"], spec["ending"]) for spec in specs] == [(3, "oom_gpu")] * 2


def test_a_server_that_allows_none_says_how_to(host, olga):
    with pytest.raises(CommandError, match="SLIPWAY_DRILLS=1"):
        said(host.slug)
    assert not Job.objects.exists()


def test_nobody_gets_a_drill_past_the_setting(team, alice, host):
    with pytest.raises(InvalidProblem, match="runs no drills"):
        make_job(team, alice, host, spec=DrillSpec())


def test_an_unknown_host_is_named(allowing, host, olga):
    with pytest.raises(CommandError, match="no host 'elsewhere'"):
        said("elsewhere")


def test_a_team_without_an_operator_is_told_so(allowing, host, alice):
    with pytest.raises(CommandError, match="has no operator"):
        said(host.slug)


def test_a_field_out_of_bounds_is_named_with_its_limit(allowing, host, olga):
    with pytest.raises(CommandError, match=r"exit_code: .* less than or equal to 255"):
        said(host.slug, "--exit-code", "900")


@pytest.mark.parametrize("page", ["detail", "metrics", "logs", "events", "config", "artefacts"])
def test_every_page_of_a_drill_can_be_read(allowing, team, alice, host, page):
    job = make_job(team, alice, host, spec=DrillSpec(), name="Rehearsal", model_name="")

    answer = client_of(alice).get(reverse(f"job-{page}", args=[job.pk]))

    assert answer.status_code == 200
    assert "Rehearsal" in answer.content.decode()
