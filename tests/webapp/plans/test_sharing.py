"""Plans over several hosts: what is offered, what is launched, what is refused by name."""

import pytest
from django.urls import reverse

from runners.jobspec.generate import PipelineSplit, StageChain, TensorSplit
from runners.plans.document import ModelChoice
from runners.plans.launch import Launch, LaunchOptionError
from runners.plans.refusals import DraftProblem
from runners.plans.spread import Spread
from runners.shared.facts import AccountFacts, PartitionFacts, ReservationFacts, SchedulerFacts
from tests.webapp.conftest import client_of, make_beat, make_facts, make_microbench
from tests.webapp.jobs.gangs import make_hosts
from webapp.agents.heartbeats import host_beat
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.hosts.pools import pool_ensure
from webapp.jobs.gangs import gang_of
from webapp.jobs.launching import launch_note, launch_of_job, launchable_of, plan_launch
from webapp.jobs.scheduler_options import check_scheduler, scheduler_of
from webapp.modelhub.models import demo_config
from webapp.plans.models import Plan
from webapp.plans.places import pools_among, reachable_hosts
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import (
    new_document,
    options_for,
    step_form,
    stored_draft,
    summaries,
)

pytestmark = pytest.mark.django_db(databases="__all__")


def pools_of(team):
    return pools_among(reachable_hosts(team), team)


@pytest.fixture
def hosts(team):
    made = make_hosts(team, 2)
    Host.objects.update(microbench=make_microbench().model_dump(mode="json"))
    for host in made:
        host.refresh_from_db()
    return made


@pytest.fixture
def make_plan(team, alice, hosts):
    def make(goal: str = "pretrain", pins: dict | None = None, **hardware) -> Plan:
        document = new_document(goal, ModelChoice(source="demo"), None)
        draft = stored_draft(document)
        draft["hardware"] |= {"pool": hosts[0].pool_id, **hardware}
        draft["pins"] |= pins or {}
        draft["workload"] |= {"global_batch_size": 12} if goal == "pretrain" else {}
        plan = Plan.objects.create(team=team, owner=alice, draft=draft)
        plan_compute(plan)
        return plan

    return make


def test_a_pool_is_offered_while_several_hosts_are_ready_and_where_it_is_shared(
    team, make_plan, other_team, hosts
):
    ((pool, hosts),) = pools_of(team)
    assert (pool.slug, [host.name for host in hosts]) == ("default", ["Box 1", "Box 2"])

    assert pools_of(other_team) == []
    hosts[0].pool.shared_with.add(other_team)
    assert [pool for pool, _ in pools_of(other_team)] == [hosts[0].pool]

    Host.objects.filter(pk=hosts[1].pk).update(state="draining")
    assert pools_of(team) == []


def test_the_planner_is_asked_about_all_hosts_and_they_share_the_batch(make_plan, alice):
    launch = launchable_of(make_plan())
    assert launch.best.cluster.nodes == 2
    assert launch.best.strategy.data_parallel_size == 2
    assert (launch.spread.num_hosts, launch.spread.devices_per_host) == (2, 1)

    plan = make_plan()
    spec = launchable_of(plan).spec
    batch = plan.draft["workload"]["global_batch_size"]
    assert spec.micro_batch_size * spec.gradient_accumulation_steps == batch
    assert spec.gradient_accumulation_steps >= 2

    job = plan_launch(plan=make_plan(), by=alice)
    assert (job.state, job.num_hosts, job.devices_per_host) == ("preflight", 2, 1)
    assert job.attempts.count() == 2


def test_a_training_on_a_slurm_host_takes_a_slot_for_each_node(make_plan, alice, hosts):
    with_scheduler(hosts[0], max_jobs=2)
    alone = make_plan(pool="", host=hosts[0].pk, ranks_per_host=2)
    assert launchable_of(alone).best.cluster.nodes == 1  # one plan leaves slots to others
    plan = make_plan(pool="", host=hosts[0].pk, ranks_per_host=2, pins={"data_parallel_size": 4})
    cluster = launchable_of(plan).best.cluster
    assert (cluster.nodes, cluster.devices_per_node) == (2, 2)
    job = plan_launch(plan=plan, by=alice)
    assert (job.state, job.num_hosts, job.devices_per_host) == ("preflight", 1, 2)
    assert job.current_attempt.allocations.filter(device__kind="slot").count() == 2
    gang = gang_of(job.current_attempt)
    assert (gang.num_nodes, gang.num_processes) == (1, 2)

    serving = make_plan("generate", pool="", host=hosts[0].pk)
    assert launchable_of(serving).best.cluster.nodes == 1

    with pytest.raises(DraftProblem, match=r"6 ranks on 3 nodes.*at most 2 slots.*--max-jobs 3"):
        make_plan(pool="", host=hosts[0].pk, ranks_per_host=2, pins={"data_parallel_size": 6})


PARTITIONS = (
    PartitionFacts(name="main", is_up=True, time_limit="1-00:00:00", nodes=4, is_default=True),
    PartitionFacts(name="gpu", is_up=True, time_limit="2:00:00", nodes=3, gres="gpu:h100:8"),
    PartitionFacts(name="old", is_up=False, time_limit="infinite", nodes=9),
)


def with_scheduler(host, max_jobs, **told):
    """Let a host report a scheduler, of itself a Slurm with some partitions."""
    facts = {"options": {}, "time_limit_minutes": 120, "partitions": PARTITIONS, **told}
    scheduler = SchedulerFacts(max_jobs=max_jobs, **facts)
    beat = make_beat(facts=make_facts(scheduler=scheduler), is_agent_start=True)
    host_beat(host=host, beat=beat)
    host.refresh_from_db()


def test_a_launch_asks_of_slurm_what_the_host_read_from_it(make_plan, alice, hosts):
    accounts = (AccountFacts(name="lab", qos=("normal", "high")),)
    reserved = (ReservationFacts(name="lab-week"),)
    limit = {"time_limit_minutes": 2 * 24 * 60}
    with_scheduler(hosts[0], 4, accounts=accounts, reservations=reserved, **limit)
    offered = {
        "account": ("lab",), "partition": ("main", "gpu"), "qos": ("normal", "high"),
        "reservation": ("lab-week",),
    }  # fmt: skip
    assert scheduler_of(hosts[0]).offered == offered
    plan = make_plan(pool="", host=hosts[0].pk, pins={"data_parallel_size": 4}, ranks_per_host=1)
    asked = {"partition": "main", "account": "lab", "qos": "high", "reservation": "lab-week"}
    asked |= {"max_duration_seconds": 3600.0}
    options = {name: asked[name] for name in offered}
    assert launchable_of(plan, Launch(**asked)).spec.scheduler_options == options
    assert check_scheduler(hosts[0], Launch(partition="gpu"), Spread(1, 1)) == 118 * 60.0
    assert check_scheduler(hosts[0], Launch(**asked), Spread(1, 1)) is None
    started = plan_launch(plan=plan, by=alice, launch=Launch(**asked))
    assert launch_of_job(started).scheduler_options == options  # which a clone has, too
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
    for name, values in offered.items():
        assert f'name="{name}"' in page
        assert all(f'value="{value}"' in page for value in values), name

    for launch, field, words in (
        ({"partition": "gpux"}, "partition", "no partition 'gpux' here; it has: main, gpu"),
        ({"account": "other"}, "account", "it has: lab"),
        (
            {"partition": "main", "max_duration_seconds": 25 * 3600.0},
            "max_duration_seconds",
            "25 h, and partition main ends a job after 24 h.*at most 1438 minutes",
        ),
        ({"max_duration_seconds": 49 * 3600.0}, "max_duration_seconds", "for more than 48 h"),
    ):
        with pytest.raises(InvalidProblem, match=words) as caught:
            launchable_of(plan, Launch(**launch))
        assert caught.value.code == field
    short = {"partition": "gpu", "max_duration_seconds": 600.0}
    with pytest.raises(DraftProblem, match=r"takes 4 nodes.*partition gpu gets at most 3"):
        launchable_of(plan, Launch(**short))
    chemists = PARTITIONS[0].model_copy(update={"accounts": ("chem",), "qos": ("low",)})
    with_scheduler(hosts[0], 4, partitions=(chemists,))
    for chosen in ({"account": "phys"}, {"qos": "high"}):
        with pytest.raises(LaunchOptionError, match=r"Partition main takes no .*; it takes: "):
            check_scheduler(hosts[0], Launch(**chosen, max_duration_seconds=60.0), Spread(1, 1))
    for place, words in ((None, "a pool"), (hosts[1], hosts[1].name), (hosts[0], hosts[0].name)):
        with pytest.raises(LaunchOptionError, match=f"and {words} does not"):
            check_scheduler(place, Launch(queue="team-a"), Spread(1, 1))


def test_a_launch_asks_of_kubernetes_what_the_agent_may_list(make_plan, alice, hosts):
    nodes = (PartitionFacts(name="NVIDIA-H100", is_up=True, time_limit="", nodes=1),)
    told = {"kind": "kubernetes", "partitions": nodes, "queues": ("team-a", "team-b")}
    with_scheduler(hosts[0], 4, **told, unread=("priority classes: forbidden",))
    plan = make_plan(pool="", host=hosts[0].pk, pins={"data_parallel_size": 4}, ranks_per_host=1)
    job = plan_launch(plan=plan, by=alice, launch=Launch(queue="team-b"))
    assert launch_of_job(job).scheduler_options == {"queue": "team-b"}
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
    assert 'value="team-b"' in page
    for name in ("priority_class", "partition", "account"):
        assert f'name="{name}"' not in page
    facts = client_of(alice).get(f"/hosts/{hosts[0].slug}/").content.decode()
    assert "<dt>Queues</dt><dd>team-a, team-b</dd>" in facts
    assert "<dt>Not told</dt><dd>priority classes: forbidden</dd>" in facts
    for launch, words in (
        ({"queue": "team-c"}, "Kubernetes has no queue 'team-c' here; it has: team-a, team-b"),
        (
            {"priority_class": "low"},
            r"no priority class 'low' .* may list \(priority classes: forb",
        ),
        ({"partition": "gpu"}, f"and {hosts[0].name} does not"),
        ({"max_duration_seconds": 3 * 3600.0}, "submits no job for more than 2 h"),
    ):
        with pytest.raises(InvalidProblem, match=words) as caught:
            launchable_of(plan, Launch(**launch))
        assert caught.value.code == next(iter(launch))


def test_a_launch_asks_of_ray_for_nodes_that_are_there_and_large_enough(make_plan, alice, hosts):
    def kinds(chosen=None):
        told = {"H100": (True, 3), "A100": (True, 2), "L4": (False, 9), "": (False, 1)}
        return tuple(
            PartitionFacts(name=name, is_up=is_up, time_limit="", nodes=nodes,
                           is_default=is_up and chosen in (None, name))
            for name, (is_up, nodes) in told.items()
        )  # fmt: skip

    options = {"gpus": "1", "cpus": "4", "address": "http://head:8265"}
    with_scheduler(hosts[0], 8, kind="ray", options=options, partitions=kinds())
    plan = make_plan(pool="", host=hosts[0].pk, pins={"data_parallel_size": 4}, ranks_per_host=1)
    job = plan_launch(plan=plan, by=alice)
    assert (job.state, job.devices_per_host) == ("preflight", 4)
    spec = launchable_of(
        make_plan(pool="", host=hosts[0].pk, pins={"data_parallel_size": 2}, ranks_per_host=1),
        Launch(partition="A100"),
    ).spec
    assert spec.scheduler_options == {"partition": "A100"}
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
    assert [f'value="{name}"' in page for name in ("H100", "A100", "L4")] == [True, True, False]
    host = client_of(alice).get(f"/hosts/{hosts[0].slug}/").content.decode()
    assert "<strong>L4</strong> (less than a job takes): 9 nodes" in host
    for launch, words in (
        ({"partition": "H100"}, r"4 nodes of H100 with 1 gpus, 4 cpus each, .* had 3 when"),
        ({"partition": "L4"}, "Ray has no partition 'L4' here; it has: H100, A100"),
        ({"queue": "gpu"}, f"and {hosts[0].name} does not"),
    ):
        with pytest.raises((InvalidProblem, DraftProblem), match=words):
            launchable_of(plan, Launch(**launch))
    with pytest.raises(DraftProblem, match=r"takes 6 nodes with .* cluster had 5 when its agent"):
        check_scheduler(hosts[0], Launch(), Spread(6, 1))
    wrong = {"kind": "ray", "options": options | {"partition": "B9"}, "partitions": kinds("B9")}
    with_scheduler(hosts[0], 8, **wrong)
    with pytest.raises(DraftProblem, match=r"1 nodes of B9 .* cluster had 0 when its agent"):
        check_scheduler(hosts[0], Launch(), Spread(1, 1))
    head = [each for each in kinds() if not each.name]  # a cluster that grows, at rest
    for grows in (kinds(), kinds("B9"), head, ()):
        with_scheduler(hosts[0], 8, kind="ray", options=options, partitions=tuple(grows),
                       autoscaling=True)  # fmt: skip
        for launch in (Launch(), Launch(partition="H100"), Launch(partition="B9")):
            assert check_scheduler(hosts[0], launch, Spread(6, 1)) is None
    assert (
        'name="partition"'
        in client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
    )


def test_fewer_gpus_than_the_plan_takes_of_a_node_are_refused(hosts):
    for kind, options, words in (
        ("slurm", {"gres": "gpu:2"}, ""),
        ("slurm", {"gres": "gpu:h100:1"}, "--gres=gpu:h100:1 .* state gpu:2 as .gres"),
        ("slurm", {"gres": "tmpdisk:9"}, ""),
        ("kubernetes", {"nvidia.com/gpu": "2", "cpus": "1"}, ""),
        ("kubernetes", {"amd.com/gpu": "1"}, "--gpus 1 .* state 2 as .gpus"),
        ("ray", {"gpus": "1", "cpus": "8"}, "--gpus 1 .* state 2 as .gpus"),
    ):
        with_scheduler(hosts[0], 1, kind=kind, options=options)
        assert hosts[0].kind == kind
        if not words:
            check_scheduler(hosts[0], Launch(), Spread(1, 2))
            continue
        with pytest.raises(DraftProblem, match=f"takes 2 devices of a node, and {words}"):
            check_scheduler(hosts[0], Launch(), Spread(1, 2))


def test_the_policy_for_a_lost_host_goes_with_the_job_as_far_as_it_can(make_plan):
    for chosen, kept in [
        ("shrink", "shrink"),
        ("restart", "restart"),
        ("stop", "stop"),
    ]:
        assert launchable_of(make_plan(on_lost_rank=chosen)).spec.parallel.on_lost_rank == kept, (
            chosen
        )

    for pin in ["pipeline_parallel_size", "tensor_parallel_size"]:
        spec = launchable_of(make_plan(pins={pin: 2}, on_lost_rank="restart")).spec
        assert (spec.parallel.on_lost_rank, spec.parallel.max_restarts) == ("restart", 3), pin

    pins = {"tensor_parallel_size": 2}
    spec = launchable_of(in_a_folder(make_plan("generate", pins=pins, on_lost_rank="shrink"))).spec
    assert (spec.split.method, spec.parallel.on_lost_rank) == ("tensor", "stop")


def test_what_is_no_training_runs_on_one_host_of_the_pool(make_plan, alice):
    job = plan_launch(plan=make_plan("generate"), by=alice)
    assert (job.num_hosts, job.requested_host) == (1, None)


@pytest.mark.parametrize("pin", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_a_training_divides_the_model_over_the_hosts_as_it_was_pinned(make_plan, alice, pin):
    job = plan_launch(plan=make_plan(pins={pin: 2}, on_lost_rank="shrink"), by=alice)
    assert job.spec["layout"][pin] == 2
    may_shrink = pin == "pipeline_parallel_size"  # its layers can be divided anew
    assert job.spec["parallel"]["on_lost_rank"] == ("shrink" if may_shrink else "stop")
    assert (job.num_hosts, job.devices_per_host) == (2, 1)


def in_a_folder(plan):
    plan.draft["model"] |= {"source": "folder", "path": "tiny", "config": demo_config()}
    plan_compute(plan)
    return plan


@pytest.mark.parametrize(
    ("pin", "split"),
    [
        ("tensor_parallel_size", TensorSplit(size=2)),
        ("pipeline_parallel_size", PipelineSplit(size=2)),
    ],
)
def test_a_generation_divides_the_model_over_the_hosts_as_it_was_pinned(
    make_plan, alice, pin, split
):
    plan = in_a_folder(make_plan("generate", pins={pin: 2}))
    assert launchable_of(plan).spec.split == split
    job = plan_launch(plan=plan, by=alice)
    assert (job.num_hosts, job.devices_per_host, job.is_shared_out) == (2, 1, True)
    assert {each.address for each in job.attempts.all()} != {""}


def test_a_generation_that_goes_on_without_a_lost_host_is_a_chain(make_plan, alice):
    pins = {"pipeline_parallel_size": 2}
    plan = in_a_folder(make_plan("generate", pins=pins, on_lost_rank="shrink"))

    spec = launchable_of(plan).spec

    assert spec.split == StageChain(stages=2)
    assert spec.parallel.on_lost_rank == "shrink"
    job = plan_launch(plan=plan, by=alice)
    first, second = (gang_of(each) for each in job.attempts.order_by("node_rank"))
    assert len(first.key) == 64
    assert first.key == second.key != job.current_attempt.fence


def test_a_model_without_weights_or_with_batches_that_do_not_fit_cannot_be_divided(make_plan):
    note = launch_note(make_plan("generate", pins={"pipeline_parallel_size": 2}))
    assert "has no weights on the host. Choose a model with weights on the host" in note["text"]

    plan = in_a_folder(make_plan("generate", pins={"tensor_parallel_size": 2}))
    plan.draft["workload"]["batching"] = "packed"
    with pytest.raises(DraftProblem, match=r"split tensor runs with .* not with batching packed"):
        launchable_of(plan)


def test_the_step_the_page_and_the_note_name_the_pool_its_hosts_and_its_policy(
    make_plan, alice, client
):
    plan = make_plan()
    options = options_for(plan)
    form = step_form("hardware", plan.document, options)
    assert (f"pool:{plan.document.hardware.pool}", "default") in form.fields["choice"].choices
    assert summaries(plan.document, options.names_of(plan.document))["hardware"] == "pool default"
    assert launch_note(make_plan())["title"] == "Launch on default (2 hosts)"

    client.force_login(alice)
    page = client.get(reverse("plan-step", args=[make_plan().pk, "hardware"])).content.decode()
    assert "2 hosts: Box 1, Box 2" in page
    assert "After the loss of a rank or host" in page


def test_a_pool_that_is_foreign_or_has_lost_its_hosts_says_so(make_plan, other_team):
    stranger = pool_ensure(team=other_team)
    plan = make_plan()
    plan.draft["hardware"]["pool"] = stranger.pk
    with pytest.raises(DraftProblem, match="too few ready hosts"):
        launchable_of(plan)

    plan = make_plan()
    Host.objects.update(state="maintenance")
    assert "too few ready hosts" in launch_note(plan)["text"]
