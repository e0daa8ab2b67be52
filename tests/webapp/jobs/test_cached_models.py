"""Models in the Hub's caches of hosts: reported, needed, deleted, pinned, pruned, preferred."""

import pytest

from runners.jobspec import HubData, HubModel, TrainSpec
from runners.shared.messages import CachedModel, CacheReport, PrunedModel
from tests.webapp.conftest import make_beat, make_job, make_microbench, new_attempt
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.hosts.models import Host
from webapp.jobs.cached_models import (
    keep_models_set,
    largest_use,
    models_delete,
    models_on_host,
    models_pin,
    needs_on,
)
from webapp.jobs.models import Job, RepositoryUse
from webapp.jobs.services import job_submit

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
A, B = "a" * 40, "b" * 40
TINY, OTHER = f"acme/tiny@{A}", f"acme/other@{B}"
GIB = 2**30


def cached(key: str, size: int = GIB, **fields) -> CachedModel:
    repository, _, commit = key.partition("@")
    values = {"size_bytes": size, "num_files": 3, "used_at_ms": 1_000, "is_complete": True}
    return CachedModel(repository=repository, commit=commit, **{**values, **fields})


def report(host: Host, *models: CachedModel, pruned: tuple[PrunedModel, ...] = ()):
    """Send a heartbeat with what the cache holds; return the host's orders."""
    cache = CacheReport(models=models, pruned=pruned)
    return host_beat(host=host, beat=make_beat(cache=cache)).cache


def stored(host: Host) -> dict[str, int]:
    return {each.key: each.size_bytes for each in host.models.all()}


@pytest.fixture
def filled(host) -> Host:
    """The host with two models in its cache."""
    report(host, cached(TINY), cached(OTHER, 2 * GIB))
    return host


def job_of(team, alice, host, repository: str = "acme/tiny", revision: str = A, **fields) -> Job:
    """Submit a job that names a repository."""
    spec = TrainSpec(model=HubModel(repository=repository, revision=revision))
    return job_submit(job=make_job(team, alice, host, spec=spec, **fields), by="alice")


def test_a_report_replaces_what_was_known_and_keeps_pins(filled):
    assert stored(filled) == {OTHER: 2 * GIB, TINY: GIB}
    models_pin(host=filled, name="acme/tiny", by="olga", is_pinned=True)
    report(filled, cached(TINY, 3 * GIB), cached("acme/new@", is_complete=False))
    assert stored(filled) == {"acme/new@": GIB, TINY: 3 * GIB}
    assert filled.models.get(repository="acme/tiny").pinned_by == "olga"
    host_beat(host=filled, beat=make_beat())  # nothing new
    assert len(stored(filled)) == 2
    report(filled)
    assert stored(filled) == {}


def test_a_host_reports_its_own_cache_only(filled, other_host):
    report(other_host, cached(TINY, 7))
    assert (stored(filled)[TINY], stored(other_host)) == (GIB, {TINY: 7})


def test_an_order_is_repeated_until_a_report_shows_it_done(filled):
    models_delete(host=filled, name="acme/tiny", by="olga")
    assert host_beat(host=filled, beat=make_beat()).cache.delete == (TINY,)
    assert [row.is_deleting for row in models_on_host(filled, ())] == [False, True]
    assert report(filled, cached(TINY), cached(OTHER)).delete == (TINY,)
    assert report(filled, cached(OTHER)) is None
    event = Event.objects.get(kind="host.model_deleted")
    assert (event.actor, event.detail) == ("olga", {"model": f"acme/tiny@{A[:12]}"})


def test_a_pin_withdraws_an_order_and_refuses_another(filled):
    models_delete(host=filled, name="acme/tiny", by="olga")
    models_pin(host=filled, name=f"acme/tiny@{A[:7]}", by="olga", is_pinned=True)
    assert host_beat(host=filled, beat=make_beat()).cache is None
    with pytest.raises(ConflictProblem, match="pinned by olga; unpin it first"):
        models_delete(host=filled, name="acme/tiny", by="olga")
    models_pin(host=filled, name="acme/tiny", by="olga", is_pinned=False)
    models_delete(host=filled, name="acme/tiny", by="olga")


@pytest.mark.parametrize("name", ["acme/none", f"acme/tiny@{B}", "acme/tiny@aa", "", "acme"])
def test_a_name_that_the_cache_lacks_is_refused_with_those_that_it_has(filled, name):
    with pytest.raises(NotFoundProblem, match="it has acme/other and acme/tiny"):
        models_delete(host=filled, name=name, by="olga")


@pytest.mark.parametrize(
    ("revision", "state", "is_free"),
    [
        (A, "queued", False),
        (A, "running", False),
        ("main", "queued", False),
        ("", "starting", False),
        (B, "queued", True),
        (A, "draft", True),
        (A, "failed", True),
        (A, "succeeded", True),
    ],
)
def test_nothing_is_deleted_that_a_queued_or_live_job_needs(
    team, alice, filled, revision, state, is_free
):
    job = job_of(team, alice, filled, revision=revision)
    Job.objects.filter(pk=job.pk).update(state=state, name="Needs it")
    if is_free:
        models_delete(host=filled, name="acme/tiny", by="olga")
        return
    with pytest.raises(ConflictProblem, match="Needs it needs acme/tiny and is"):
        models_delete(host=filled, name="acme/tiny", by="olga")
    models_delete(host=filled, name="acme/other", by="olga")


def test_an_order_waits_while_a_later_job_needs_the_model(team, alice, filled):
    models_delete(host=filled, name="acme/tiny", by="olga")
    job = job_of(team, alice, filled)
    assert host_beat(host=filled, beat=make_beat()).cache.delete == ()
    Job.objects.filter(pk=job.pk).update(state="failed")
    assert host_beat(host=filled, beat=make_beat()).cache.delete == (TINY,)


def test_jobs_that_wait_for_any_host_and_those_beside_need_their_models(
    team, alice, filled, other_host
):
    """A pool's job may start on each of its hosts; hosts of one machine may share a cache."""

    def needed(host: Host) -> set[str]:
        return {need.use.key for need in needs_on([Host.objects.get(pk=host.pk)])[host.pk]}

    job = job_of(team, alice, filled)
    Job.objects.filter(pk=job.pk).update(state="queued", requested_host=None)
    Host.objects.filter(pk=other_host.pk).update(boot_id="another")
    assert (needed(filled), needed(other_host)) == ({TINY}, {TINY})
    Job.objects.filter(pk=job.pk).update(requested_host=filled)
    assert (needed(filled), needed(other_host)) == ({TINY}, set())
    Host.objects.filter(pk=other_host.pk).update(boot_id=filled.boot_id)
    assert needed(other_host) == {TINY}


def test_every_repository_that_a_job_names_is_recorded_once(team, alice, host):
    job = job_of(team, alice, host)
    job_submit(job=job, by="alice")
    uses = RepositoryUse.objects.filter(job=job).values_list("repository", "revision")
    assert list(uses) == [("acme/tiny", A)]


def test_a_rule_is_sent_with_what_it_must_keep_and_pruned_models_are_recorded(team, alice, filled):
    assert host_beat(host=filled, beat=make_beat()).cache is None
    keep_models_set(host=filled, keep_bytes=GIB, by="olga")
    models_pin(host=filled, name="acme/other", by="olga", is_pinned=True)
    job_of(team, alice, filled, "acme/third", "main")
    orders = host_beat(host=filled, beat=make_beat()).cache
    assert (orders.keep_bytes, orders.kept) == (GIB, (OTHER, "acme/third"))
    pruned = (PrunedModel(repository="acme/tiny", commit=A, freed_bytes=GIB, at_ms=5),)
    for _ in range(2):  # the second time the reply was lost
        report(filled, cached(OTHER), pruned=pruned)
    event = Event.objects.get(kind="host.model_pruned")
    assert (event.actor, event.detail) == (
        f"host:{filled.slug}",
        {"model": TINY, "freed_bytes": GIB},
    )
    keep_models_set(host=filled, keep_bytes=None, by="olga")
    keep_models_set(host=filled, keep_bytes=None, by="olga")  # no change, no event
    assert Event.objects.filter(kind="host.models_rule").count() == 2
    assert host_beat(host=filled, beat=make_beat()).cache is None
    for wrong in (-1, 2**61):
        with pytest.raises(InvalidProblem, match="keep_gib is"):
            keep_models_set(host=filled, keep_bytes=wrong, by="olga")


def test_each_model_names_the_jobs_of_the_readers_teams_that_used_it(
    team, other_team, alice, filled, django_assert_num_queries
):
    first = job_of(team, alice, filled)
    Job.objects.filter(pk=first.pk).update(state="succeeded")
    last = job_of(team, alice, filled, revision="main")
    new_attempt(last)
    other, tiny = models_on_host(filled, [team.pk])
    assert (tiny.num_jobs, tiny.last_job, tiny.is_needed) == (2, last, True)
    assert (other.num_jobs, other.last_job, other.is_needed) == (0, None, False)
    assert models_on_host(filled, [other_team.pk])[1].num_jobs == 0
    report(filled, *(cached(f"acme/m{number}@{A}") for number in range(30)), cached(TINY))
    with django_assert_num_queries(6):
        assert len(models_on_host(filled, [team.pk])) == 31


@pytest.mark.parametrize(
    ("has", "is_complete", "taken"),
    [("Box", True, "Box"), ("Box 2", True, "Box 2"), ("Box 2", False, "either")],
)
def test_a_pools_job_goes_to_the_host_that_has_its_weights(
    team, alice, host, other_host, has, is_complete, taken
):
    other = make_beat(microbench=make_microbench(), boot_id="another")
    host_beat(host=other_host, beat=other)
    report(Host.objects.get(name=has), cached(TINY, is_complete=is_complete))
    spec = TrainSpec(model=HubModel(repository="acme/tiny", revision=A))
    job = make_job(team, alice, None, spec=spec, pool=host.pool)
    job_submit(job=job, by="alice")
    job.refresh_from_db()
    assert job.host is not None  # nobody waits for the weights
    assert taken in {job.host.name, "either"}


def test_a_data_set_is_listed_and_needed_as_a_model_is_and_a_job_prefers_its_models_host(
    team, alice, host
):
    data = HubData(repository="datasets/acme/notes", revision=A)
    report(host, cached(f"{data.repository}@{A}"))
    assert set(stored(host)) == {f"datasets/acme/notes@{A}"}
    spec = TrainSpec(data=data, model=HubModel(repository="acme/tiny", revision=A))
    job_submit(job=make_job(team, alice, host, spec=spec), by="alice")
    with pytest.raises(ConflictProblem, match="needs datasets/acme/notes"):
        models_delete(host=host, name=data.repository, by="olga")
    for named, expected in ((spec, "acme/tiny"), (TrainSpec(data=data), data.repository)):
        assert largest_use(named.model_dump(mode="json")).repository == expected
    assert largest_use(TrainSpec().model_dump(mode="json")) is None
