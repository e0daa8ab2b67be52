"""What a finished job leaves: measurements, factors of its host, models to evaluate."""

import math

import pytest

from planner.specs.estimate import PlanRequest
from planner.specs.workload import TrainWorkload
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    EvaluateSpec,
    FileData,
    FolderModel,
    SampleOptions,
    TrainSpec,
)
from runners.jobspec.compress import EvaluationTasks
from runners.launchers.launch import environment_of
from tests.webapp.conftest import (
    EXIT_OK,
    batch_of,
    claim,
    client_of,
    make_beat,
    make_job,
    make_microbench,
)
from tests.webapp.jobs.gangs import end, make_gang, make_hosts, members, start, tell
from tests.webapp.jobs.undone import undone
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.problems import InvalidProblem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import Host
from webapp.jobs.accuracy import accuracy_for
from webapp.jobs.calibration import (
    RowsRead,
    as_read,
    attributed_measurements,
    questions_of,
    recalibrate,
    rows_read,
)
from webapp.jobs.evaluating import evaluation_of, evaluation_submit, left_model, tasks_of
from webapp.jobs.host_accuracy import accuracy_of, jobs_together
from webapp.jobs.models import Attempt, Job, JobState, Measurement
from webapp.jobs.services import job_submit
from webapp.modelhub.models import TeamModel, demo_config

pytestmark = pytest.mark.django_db(databases="__all__")
MEASURED = {"step_seconds": 2.0, "peak_memory_bytes": 1.5e9, "perplexity": 40.0, "parameters": 7e6}
PREDICTION = {
    "step_seconds": {"value": 1.0, "low": 0.5, "high": 2.5, "unit": "seconds"},
    "peak_memory_bytes": {"value": 1e9, "unit": "bytes"},
    "tokens_per_second": {"value": 5.0, "unit": "tokens_per_second"},
}
MODEL = {
    "name": "model",
    "kind": "model",
    "total_bytes": 2,
    "files": {"config.json": 2},
    "sha256": {"config.json": "0" * 64},
    "facts": {"perplexity": 40.0},
}


def plan_request(host: Host) -> dict:
    request = PlanRequest(
        model=demo_config(),
        cluster=cluster_for_host(host),
        workload=TrainWorkload(sequence_length=256, global_batch_size=8, method="pretrain"),
    )
    return request.model_dump(mode="json")


def finish(job: Job, measured: dict = MEASURED, reason: str = "ok") -> Attempt:
    """Run a submitted job to its end over the one door."""
    claim(job.current_attempt)
    attempt = Attempt.objects.get(pk=job.current_attempt_id)
    result = ("result", {"measured": measured})
    exited = ("exited", EXIT_OK | {"reason": reason})
    events_accept(host=job.host, batch=batch_of(attempt, result, ("artefact", MODEL), exited))
    return attempt


def submitted(team, alice, host, **changes) -> Job:
    job = make_job(team, alice, host, prediction=PREDICTION, **changes)
    Job.objects.filter(pk=job.pk).update(plan_request=plan_request(host))
    job.refresh_from_db()
    return job_submit(job=job, by="alice")


@pytest.fixture
def finished(team, alice, host, django_capture_on_commit_callbacks) -> Job:
    job = submitted(team, alice, host)
    with django_capture_on_commit_callbacks(execute=True):
        finish(job)
    return Job.objects.get(pk=job.pk)


# Measurements


def test_what_was_predicted_and_measured_stands_side_by_side_and_nothing_else(finished):
    row = Measurement.objects.get(metric="step_seconds")
    assert (row.predicted, row.measured, row.ratio) == (1.0, 2.0, 2.0)
    assert (row.predicted_low, row.predicted_high, row.unit) == (0.5, 2.5, "seconds")
    metrics = set(Measurement.objects.values_list("metric", flat=True))
    assert metrics == {"step_seconds", "peak_memory_bytes"}


def test_a_job_that_failed_measures_nothing(team, alice, host):
    finish(submitted(team, alice, host), reason="oom_host")
    assert not Measurement.objects.exists()
    assert not TeamModel.objects.exists()


# Calibration


def test_a_slow_step_becomes_a_factor_of_the_host_which_does_not_compound(finished, host):
    calibration = Host.objects.get().calibration
    assert calibration["host"] == "box"
    assert any(factor["factor"] > 1 for factor in calibration["factors"].values())
    first = recalibrate(host)
    assert recalibrate(host) == first


def test_what_is_excluded_or_cannot_be_read_calibrates_nothing(finished, host):
    with undone():
        Job.objects.update(plan_request={"model": "no-such-model"})
        assert recalibrate(host).factors == {}
    with undone():
        Measurement.objects.update(is_excluded=True)
        assert recalibrate(host).factors == {}


def test_a_quantised_model_is_asked_about_before_and_after_and_a_benchmark_as_one_batch(
    team, alice, host
):
    spec = CompressSpec(model=DemoModel(), method="nf4")
    job = submitted(team, alice, host, spec=spec)
    asked = [(item.prefix, item.request.strategy.weight_dtype) for item in questions_of(job)]
    assert asked == [("original_", "bf16"), ("", "int4")]

    spec = BenchmarkSpec(model=DemoModel(), batch_size=3, prompt_tokens=64, output_tokens=16)
    workload = next(questions_of(submitted(team, alice, host, spec=spec))).request.workload
    assert (workload.kind, workload.batch_size, workload.input_tokens) == ("generate", 3, 64)


# Models


def test_the_trained_model_joins_the_teams_models_and_knows_the_positions_it_was_shown(
    finished, team, host
):
    model = TeamModel.objects.get()
    assert (model.team, model.host, model.source) == (team, host, "job")
    assert (model.num_parameters, model.weight_dtype) == (7_000_000, "bf16")
    assert model.facts["measured"]["perplexity"] == 40.0
    config = TeamModel.objects.get().config
    assert config["max_position_embeddings"] == TrainSpec().sequence_length


def test_a_quantised_model_keeps_the_config_of_its_source(finished, team, alice, host):
    source = TeamModel.objects.get()
    spec = CompressSpec(model=ArtefactModel(attempt_id=source.attempt_id), method="nf4")
    finish(job_submit(job=make_job(team, alice, host, spec=spec), by="alice"))
    quantised = TeamModel.objects.get(weight_dtype="int4")
    assert (quantised.config, quantised.num_parameters) == (source.config, 7_000_000)
    assert quantised.name == "demo, int4"


def test_a_reward_model_makes_no_text_and_is_no_model_of_the_team(team, alice, host):
    data = {"source": "file", "path": "pairs.jsonl", "format": "preference"}
    folder = {"source": "folder", "path": "llama"}
    for objective, models in (("reward", 0), ("dpo", 1)):
        spec = TrainSpec.model_validate(
            {"engine": "trl", "objective": objective, "data": data, "model": folder}
        )
        finish(job_submit(job=make_job(team, alice, host, spec=spec), by="alice"))
        assert TeamModel.objects.count() == models, objective


# What several hosts measure together: told of the job, and changes no single host.


@pytest.fixture
def together(team, alice, django_capture_on_commit_callbacks) -> Job:
    """A training on two hosts that ended well and measured what was predicted for it."""
    hosts = make_hosts(team, 2)
    host_beat(host=hosts[0], beat=make_beat(microbench=make_microbench()))
    asked = plan_request(Host.objects.get(pk=hosts[0].pk))
    job = make_gang(team, alice, hosts)
    Job.objects.filter(pk=job.pk).update(prediction=PREDICTION, plan_request=asked)
    with django_capture_on_commit_callbacks(execute=True):
        first, *others = start(job)
        tell(first, ("result", {"measured": MEASURED}))
        for member in (first, *others):
            end(member)
    return Job.objects.get(pk=job.pk)


def test_it_is_set_beside_the_prediction_and_neither_host_learns_from_it(together, alice):
    assert together.state == "succeeded"
    assert Measurement.objects.get(metric="step_seconds").ratio == 2.0
    for member in members(together):
        assert member.host.calibration == {}
        assert recalibrate(member.host).factors == {}
    leader = members(together)[0].host
    assert accuracy_of(leader) is None
    assert accuracy_for(alice).num_jobs == 1  # how good predictions are over all


def test_a_host_still_learns_from_what_it_runs_alone(
    together, team, alice, django_capture_on_commit_callbacks
):
    leader = Host.objects.get(name="Box 1")
    with django_capture_on_commit_callbacks(execute=True):
        finish(submitted(team, alice, leader))
    assert any(each.n for each in recalibrate(leader).factors.values())


def test_the_pages_say_what_was_left_out_of_the_hosts_factors(together, alice):
    for member in members(together):
        assert jobs_together(member.host) == 1
        text = client_of(alice).get(f"/hosts/{member.host.slug}/").content.decode()
        assert "Excluded: 1 multi-host job. Its times depend" in text
    text = client_of(alice).get(f"/jobs/{together.pk}/").content.decode()
    assert "Measured across 2 hosts, so the figures calibrate none of them." in text


# What a training's rows turned out to be: the plan for them, and what they say of the host.


PADDED = TrainSpec(data=FileData(path="chats.jsonl"), samples=SampleOptions(rows="padded"))
PACKED = PADDED.model_copy(update={"samples": SampleOptions(rows="packed")})
ROWS = PADDED.micro_batch_size * PADDED.gradient_accumulation_steps
# 10 steps of rows of 64 positions, of which 16 are padding
READ = {"step_seconds": 2.0, "peak_memory_bytes": 1.5e9, "parameters": 7e6, "steps": 10.0}
READ |= {"tokens": 10.0 * ROWS * 48, "padding_share": 0.25, "tokens_per_second": 500.0}
ODD_STEPS = {"steps": 0.0}


@pytest.fixture
def ended(team, alice, host, django_capture_on_commit_callbacks):
    """A training on a file that has ended, by its spec and what it measured."""

    def end(spec: TrainSpec, **changes: float) -> Job:
        job = submitted(team, alice, host, spec=spec)
        with django_capture_on_commit_callbacks(execute=True):
            finish(job, READ | changes)
        return Job.objects.get(pk=job.pk)

    return end


def ratio_of(learned) -> float:
    return learned.measurement.measured / learned.measurement.predicted


def test_rows_are_what_the_steps_read_on_the_average():
    assert rows_read(PADDED, READ) == RowsRead(64, 0.25)
    assert rows_read(PADDED, READ | {"padding_share": 0.0}) == RowsRead(48, 0.0)
    assert rows_read(TrainSpec(), READ) is None  # of the host's own text every row is full
    classifier = TrainSpec(model=FolderModel(path="bert"), objective="classification")
    assert rows_read(classifier, READ) == RowsRead(64, 0.25)
    growing = PADDED.model_copy(update={"length_schedule": ((64, 0.5), (256, 0.5))})
    assert rows_read(growing, READ) is None
    for odd in (ODD_STEPS, {"padding_share": 1.0}, {"padding_share": math.nan}, {"tokens": 0.0}):
        assert rows_read(PADDED, READ | odd) is None


def test_a_training_on_padded_rows_calibrates_its_host_by_the_rows_it_read(ended, host):
    job = ended(PADDED)
    (question,) = questions_of(job)
    assert question.request.workload.sequence_length == 64
    assert question.request.workload.padding_ratio == 0.25
    assert "peak_memory_bytes" not in question.metrics  # the longest row's, and nobody knows it

    (slow,) = attributed_measurements(job, host)
    longer = READ | {"tokens": 10.0 * ROWS * 192}
    Job.objects.update(result={"measured": longer})
    (less,) = attributed_measurements(Job.objects.get(pk=job.pk), host)

    assert ratio_of(slow) > 1  # 2 s are long for rows of 64 positions
    assert ratio_of(less) < ratio_of(slow)  # and less so for rows of 256


def test_packed_rows_calibrate_memory_too(ended, host):
    full = ended(PACKED, tokens=10.0 * ROWS * 256 * 0.99, padding_share=0.01)
    (question,) = questions_of(full)
    assert question.request.workload.sequence_length == 256
    assert "memory" in recalibrate(host).factors
    assert as_read(full) == ""  # as good as the plan's


def test_a_job_that_does_not_say_what_it_read_calibrates_nothing(ended, host):
    job = ended(PADDED)
    for lacking in ("steps", "tokens", "padding_share"):
        measured = {name: value for name, value in READ.items() if name != lacking}
        Job.objects.filter(pk=job.pk).update(result={"measured": measured})
        job.refresh_from_db()
        assert list(questions_of(job)) == []
        assert as_read(job) == ""
    assert recalibrate(host).factors == {}


def test_the_page_says_what_the_plan_is_for_such_rows(ended, alice):
    job = ended(PADDED)
    predicted = Measurement.objects.get(job=job, metric="step_seconds").predicted

    page = client_of(alice).get(f"/jobs/{job.pk}/").content.decode()

    said = as_read(job)
    assert said.startswith(
        "The plan takes every row for 256 tokens of text; those of this data had 64 positions on "
        "the average, 25\N{NO-BREAK SPACE}% of them padding. For such rows it says "
    )
    assert " a step (" in said
    assert said in page
    assert predicted == 1.0  # what was launched with stays as it was


def test_a_plan_that_cannot_be_asked_again_says_nothing_and_the_page_stands(ended, alice):
    for changes in [
        {"estimate": {"strategy": {"tensor_parallel_size": 4096}}},
        {"estimate": {"strategy": {"of_an_older_version": 1}}},
        {"plan_request": {"of_an_older_version": 1}},
    ]:
        with undone(changes):
            job = ended(PADDED)
            Job.objects.filter(pk=job.pk).update(**changes)
            job.refresh_from_db()

            assert as_read(job) == ""
            assert client_of(alice).get(f"/jobs/{job.pk}/").status_code == 200


# The button that judges a model against its original: what it queues, for whom, and when not.


ORIGINAL = ArtefactModel(attempt_id="01TRAINED")


@pytest.fixture
def make_model(team, alice, host):
    """Return a function that registers what a job of the given spec left on the host."""

    def make(spec, **changes) -> TeamModel:
        job = make_job(team, alice, host, spec=spec)
        fields = {
            "team": team,
            "name": "demo, int8",
            "source": "job",
            "config": demo_config(),
            "host": host,
            "attempt_id": "01COMPRESSED",
            "artefact_name": "model",
            "weight_dtype": "int8",
            "facts": {"job": job.pk},
        }
        return TeamModel.objects.create(**fields | changes)

    return make


@pytest.fixture
def compressed(make_model) -> TeamModel:
    return make_model(CompressSpec(model=ORIGINAL, method="int8"))


def press(user, model):
    return client_of(user).post(f"/models/{model.pk}/evaluate/", follow=True)


def test_a_compressed_model_is_judged_against_what_was_compressed(compressed):
    assert evaluation_of(compressed) == EvaluateSpec(
        model=ArtefactModel(attempt_id="01COMPRESSED"), weight_dtype="int8", original=ORIGINAL
    )


def test_a_tuned_model_is_judged_against_its_folder_and_a_new_one_alone(make_model):
    model = make_model(TrainSpec(model=FolderModel(path="llama")), weight_dtype="bf16")
    assert evaluation_of(model).original == FolderModel(path="llama")

    model = make_model(TrainSpec(), weight_dtype="bf16")
    assert evaluation_of(model).original is None
    assert left_model(model).evaluation == "Evaluate this model"


def test_what_no_job_can_judge_is_refused_and_has_no_button(make_model):
    for changes, code in [
        ({"facts": {}}, "no_original"),
        ({"source": "config"}, "no_original"),
        ({"host": None}, "no_host"),
    ]:
        with undone(changes, code):
            model = make_model(CompressSpec(model=ORIGINAL), **changes)

            with pytest.raises(InvalidProblem) as refused:
                evaluation_submit(model=model, by=Job.objects.get().owner)
            assert (refused.value.code, left_model(model).evaluation) == (code, "")


def test_a_gguf_file_is_refused_by_name(make_model):
    model = make_model(CompressSpec(model=ORIGINAL, method="gguf"))
    with pytest.raises(InvalidProblem, match="GGUF file for llama"):
        evaluation_of(model)


def test_pressing_the_button_queues_the_job_where_the_weights_lie(bob, compressed):
    page = press(bob, compressed).content.decode()
    job = Job.objects.get(kind="evaluate")
    assert (job.owner, job.requested_host, job.state) == (bob, compressed.host, JobState.PREFLIGHT)
    assert Event.objects.filter(subject=job.pk, to_state=JobState.QUEUED).exists()
    assert "Evaluate demo, int8" in page


def test_pressing_it_for_a_model_without_an_original_says_what_to_do(bob, make_model):
    page = press(bob, make_model(TrainSpec(), facts={})).content.decode()
    assert "Compress or train a model here and evaluate the result" in page
    assert not Job.objects.filter(kind="evaluate").exists()


def test_a_viewer_may_not_press_it_and_sees_no_button(vera, bob, compressed):
    path = f"/models/{compressed.pk}/"
    assert press(vera, compressed).status_code == 403
    assert "Evaluate against the original" not in client_of(vera).get(path).content.decode()
    assert "Evaluate against the original" in client_of(bob).get(path).content.decode()


def test_for_another_team_the_model_does_not_exist(charlie, compressed):
    assert press(charlie, compressed).status_code == 404


def test_the_form_asks_for_tasks():
    for posted, tasks in [
        ({}, None),
        ({"tasks": "", "task_folder": "x"}, None),
        ({"tasks": "held_out", "task_folder": "left over"}, EvaluationTasks()),
        (
            {"tasks": "folder", "task_folder": " t ", "task_names": "a, b", "documents": "9"},
            EvaluationTasks(folder="t", names=("a", "b"), documents=9),
        ),
    ]:
        assert tasks_of(posted) == tasks, (posted, tasks)


def test_a_field_that_names_no_tasks_is_refused_by_its_label():
    for posted, message in [
        ({"tasks": "folder"}, "“Folder of tasks” is empty"),
        ({"tasks": "folder", "task_folder": "x" * 1001}, "longer than 1000"),
        ({"tasks": "held_out", "task_names": "../up"}, "“Task names” contains an invalid name"),
        (
            {"tasks": "held_out", "documents": "0"},
            "“Maximum documents per task” is not a whole number",
        ),
        (
            {"tasks": "held_out", "documents": "many"},
            "“Maximum documents per task” is not a whole number",
        ),
    ]:
        with pytest.raises(InvalidProblem, match=message):
            tasks_of(posted)


def test_tasks_that_were_asked_for_reach_the_job_and_its_environment(bob, compressed):
    path = f"/models/{compressed.pk}/evaluate/"
    client_of(bob).post(path, {"tasks": "held_out", "documents": "5"})
    spec = Job.objects.get(kind="evaluate").spec
    assert spec["tasks"] == {"names": [], "folder": None, "documents": 5}
    assert environment_of(spec) == "lm_eval"
