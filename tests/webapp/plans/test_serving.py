"""A serve plan that stays up or is measured: what the host is asked, what is refused."""

import re
from html import unescape

import pytest
from django.contrib.sessions.models import Session
from django.utils.html import escape
from pydantic import ValidationError

from planner.specs.workload import Strategy
from runners.jobspec import ArtefactModel, BenchmarkSpec, CompressSpec, HubModel, ServeSpec
from runners.jobspec.compress import ClosedLoop, OpenLoop
from runners.jobspec.engines import ENGINES, needing_gpu, running_on, with_feature
from runners.jobspec.serve import (
    LEAST_MEMORY_RATIO,
    MOST_MEMORY_RATIO,
    Draft,
    EngineOptions,
    key_hash,
)
from runners.plans.launch import Launch, LaunchOptionError
from runners.plans.load_levels import load_options
from runners.plans.refusals import DraftProblem
from runners.plans.serving_spec import (
    check_serving,
    check_split,
    options_of,
    served_name,
)
from runners.plans.spread import Spread
from runners.shared.facts import GpuFacts
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from webapp.accounts.models import Team
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.jobs.artefacts import adapters_of, producer_of
from webapp.jobs.endpoints import playground_key
from webapp.jobs.launching import launch_note, launch_of_job, launchable_of, plan_launch
from webapp.jobs.models import Artefact, Attempt, Job
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.plans.predicting import CURVE, curve_points, usual_points
from webapp.wizard.drafts import goal_change
from webapp.wizard.launch_form import LaunchForm, launch_form

pytestmark = pytest.mark.django_db(databases="__all__")
WISH = Launch(run="endpoint", idle_stop_seconds=90.0)
HASHES = ("a" * 64,)
ON_GPUS = [each.name for each in with_feature("parallel_sizes")]
TRAINED = ArtefactModel(attempt_id="01H" + "A" * 23)


@pytest.fixture
def plan(serve_plan, trained):
    plan = with_model(serve_plan, trained, "serve")
    plan.draft["workload"] |= {"concurrency": 4, "input_tokens": 64, "output_tokens": 32}
    plan.save()
    return plan


def test_an_endpoint_takes_the_plans_concurrency_and_length_and_has_no_end(plan, alice):
    spec = launchable_of(plan, WISH, HASHES).spec
    assert isinstance(spec, ServeSpec)
    assert (spec.max_concurrency, spec.max_length, spec.kv_cache_tokens) == (4, 256, 384)
    assert (spec.host, spec.port, spec.served_name) == ("127.0.0.1", 0, "trained-demo")
    assert (spec.key_hashes, spec.idle_stop_seconds) == (HASHES, 90.0)

    launch = launchable_of(plan, WISH)
    assert launch.max_duration_seconds is None
    assert {"ttft_seconds", "tpot_seconds", "peak_memory_bytes"} <= set(launch.prediction)

    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
    assert "Start endpoint" in page
    assert launch_note(plan)["can_serve"] == "yes"

    spec = launchable_of(plan, Launch(run="endpoint", engine="llamacpp")).spec
    assert (spec.engine, spec.max_length, spec.kv_cache_tokens) == ("llamacpp", 96, 4 * 96)


def test_what_was_asked_for_is_the_first_button(plan, alice):
    for preset, primary in (("endpoint", "endpoint"), ("benchmark", "job")):
        plan.wizard["preset"] = preset
        plan.save()
        page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
        buttons = re.findall(r'class="button primary" name="run" value="(\w+)"', page)
        assert buttons == [primary], preset


def test_a_model_without_weights_is_not_offered_as_an_endpoint(serve_plan):
    note = launch_note(serve_plan)
    assert "An endpoint needs trained weights" in note["endpoint"]
    assert "can_serve" not in note
    with pytest.raises(DraftProblem, match="needs trained weights"):
        launchable_of(serve_plan, WISH)


@pytest.fixture
def adapter(plan, trained, host, alice):
    base = {"source": "artefact", "attempt_id": trained.attempt_id, "name": "model"}
    job = plan_launch(plan=plan, by=alice)
    attempt = Attempt.objects.create(job=job, host=host, number=2)
    return Artefact.objects.create(
        attempt=attempt, name="adapter", kind="adapter", total_bytes=1, facts={"base": base}
    )


def test_an_endpoint_takes_the_adapters_that_were_trained_on_its_model(plan, adapter, alice):
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()

    spec = launchable_of(plan, WISH.with_values(adapters=True)).spec

    assert 'name="adapters"' in page
    name = f"{served_name(adapter.attempt.job.name)}-{adapter.attempt_id[-6:].lower()}"
    assert [each.name for each in spec.adapters] == [name]
    assert spec.adapters[0].adapter.attempt_id == adapter.attempt_id
    assert launchable_of(plan, WISH).spec.adapters == ()


@pytest.mark.parametrize("choice", ["all", "one"])
def test_a_generation_takes_one_adapter_or_all_of_them(plan, adapter, alice, choice):
    goal_change(plan, "generate")
    plan.save()
    (known,) = adapters_of(plan.team, TRAINED, producer_of(TRAINED))
    chosen = known.name if choice == "one" else choice

    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
    job = plan_launch(plan=plan, by=alice, launch=Launch(adapter=chosen))

    assert f'<option value="{known.name}">' in page
    assert job.spec["adapters"] == [known.model_dump(mode="json")]
    assert launchable_of(plan).spec.adapters == ()


def test_an_adapter_that_nobody_trained_is_refused_by_name(plan, adapter):
    goal_change(plan, "generate")
    plan.save()
    with pytest.raises(DraftProblem, match="No adapter other was trained on this model"):
        launchable_of(plan, Launch(adapter="other"))


def test_an_adapter_named_like_the_model_is_refused_before_the_host_is_asked(
    plan, adapter, trained
):
    (known,) = adapters_of(plan.team, TRAINED, producer_of(TRAINED))
    TeamModel.objects.filter(pk=trained.pk).update(name=known.name)
    with pytest.raises(DraftProblem, match=f"the name {known.name} is given twice"):
        launchable_of(Plan.objects.get(pk=plan.pk), WISH.with_values(adapters=True))


def test_adapters_of_another_team_or_base_are_never_offered(plan, adapter, trained):
    base = {**adapter.facts["base"], "name": "other"}
    Artefact.objects.filter(pk=adapter.pk).update(facts={"base": base})
    assert "adapters" not in launch_note(plan)
    assert adapters_of(Team.objects.create(name="else"), TRAINED, producer_of(TRAINED)) == ()


def test_only_a_serve_plan_becomes_an_endpoint(demo_plan):
    assert "endpoint" not in launch_note(demo_plan)
    with pytest.raises(DraftProblem, match="Only a plan to serve"):
        launchable_of(demo_plan, WISH)


def test_the_key_is_shown_once_and_only_hashes_of_it_are_kept(plan, alice):
    client = client_of(alice)
    posted = {"run": "endpoint", "idle_stop_seconds": "1.5", "name": "Ours", "key": "k1"}

    client.post(f"/plans/{plan.pk}/launch/", posted)

    job = Job.objects.get()
    first = client.get(f"/jobs/{job.pk}/").content.decode()
    key = first.partition('id="endpoint-key">')[2].partition("<")[0]
    assert key.startswith("sk-slipway-")
    assert job.spec["key_hashes"] == [
        key_hash(key),
        key_hash(playground_key(key_hash(key))),
    ]
    assert job.spec["idle_stop_seconds"] == 90.0
    again = client.get(f"/jobs/{job.pk}/").content.decode()
    assert "endpoint-key" not in again
    assert key not in str(Job.objects.values())


def test_the_review_starts_the_best_engine_of_the_host_and_says_why(plan, alice):
    client = client_of(alice)
    page = client.get(f"/plans/{plan.pk}/edit/review/").content.decode()
    assert ("Start on the best engine" in page) == (len(launch_note(plan)["engines"]) > 1)

    started = client.post(f"/plans/{plan.pk}/launch/", {"run": "best-engine", "key": "k1"})

    job = Job.objects.get()
    assert started["Location"] == f"/jobs/{job.pk}/"
    row = ENGINES[job.spec["engine"]]
    assert job.plan.document.hardware.engine == row.planned_as
    shown = unescape(client.get(started["Location"]).content.decode())
    assert f"Engine: {row.title}, " in shown
    assert "endpoint-key" in shown


def test_no_session_holds_the_key_in_clear(plan, alice):
    client = client_of(alice)
    posted = {"run": "endpoint", "idle_stop_seconds": "1", "key": "k1"}
    client.post(f"/plans/{plan.pk}/launch/", posted)
    job = Job.objects.get()

    kept = str([row.get_decoded() for row in Session.objects.all()])
    assert job.pk in kept
    assert "sk-slipway-" not in kept
    assert "sk-slipway-" in client.get(f"/jobs/{job.pk}/").content.decode()


def test_the_same_press_twice_shows_no_key_that_opens_nothing(plan, alice):
    client = client_of(alice)
    posted = {"run": "endpoint", "idle_stop_seconds": "", "key": "k2"}
    client.post(f"/plans/{plan.pk}/launch/", posted)
    client.get(f"/jobs/{Job.objects.get().pk}/")

    client.post(f"/plans/{plan.pk}/launch/", posted)

    assert "endpoint-key" not in client.get(f"/jobs/{Job.objects.get().pk}/").content.decode()


def test_what_the_engine_does_not_run_is_refused_by_name_with_the_way_out(plan):
    for pins, words in (
        ({"kv_cache_dtype": "fp8"}, "fp8.*Pin the KV cache"),
        ({"kv_cache_dtype": "int8"}, "int8.*Pin the KV cache"),
        ({"attention": "eager"}, "“eager”, which endpoints do not support"),
    ):
        plan.draft["pins"], plan.answer = pins, {}
        with pytest.raises(DraftProblem, match=words):
            launchable_of(plan, WISH)

    draft = {"draft_model": "meta-llama/Llama-3.2-1B", "tokens": 4}
    with pytest.raises(
        DraftProblem, match=r"Llama-3\.2-1B, and endpoints of this engine do not support"
    ):
        check_serving(Strategy.model_validate({"weight_dtype": "bf16", "speculative": draft}))


@pytest.mark.parametrize(("pins", "tokens"), [({}, 512), ({"max_batch_tokens": 1024}, 1024)])
def test_the_plans_tokens_of_a_step_reach_the_engine(plan, pins, tokens):
    plan.draft["pins"] = pins
    assert launchable_of(plan, WISH).spec.max_batch_tokens == tokens


def form_of(**posted: str) -> LaunchForm:
    engines = [(name, each.words) for name, each in ENGINES.items()]
    note = {"goal": "serve", "is_serving": True, "engines": engines}
    return launch_form(Launch(), "title", note, (), {"run": "endpoint", **posted})


def test_the_form_asks_for_an_engine_minutes_and_adapters_by_a_tick():
    assert form_of(engine="llamacpp").is_valid()
    assert form_of().is_valid()
    read = form_of(engine="llamacpp", adapters="on", idle_stop_seconds="5")
    assert read.is_valid()
    assert (read.launch.engine, read.launch.adapters) == ("llamacpp", True)
    assert read.launch.idle_stop_seconds == 300.0

    assert "is other, which is not offered here" in form_of(engine="other").errors["engine"][0]
    for text in ["0", "-1", "nan", "soon", "1e9"]:
        errors = form_of(idle_stop_seconds=text).errors["idle_stop_seconds"]
        assert "It must be a number from 0.1 to 10,080." in errors[0], (text, errors)


def with_gpus(host: Host, count: int, vendor: str = "nvidia") -> Host:
    """Give a host GPUs as its agent reports them."""
    gpu = GpuFacts(index=0, uuid="GPU-0", name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30)
    gpu = gpu.model_copy(update={"vendor": vendor})
    gpus = [gpu.model_copy(update={"index": at, "uuid": f"GPU-{at}"}) for at in range(count)]
    host.facts["gpus"] = [each.model_dump(mode="json") for each in gpus]
    host.save()
    return host


@pytest.fixture
def gpu_plan(plan, host, alice):
    with_gpus(host, 2)
    plan_compute(plan)
    return plan


def test_an_engine_on_gpus_is_offered_where_the_host_has_some(plan, host, alice):
    url = f"/plans/{plan.pk}/edit/review/"
    without = client_of(alice).get(url).content.decode()
    with_gpus(host, 1)
    plan_compute(plan)

    found = client_of(alice).get(url).content.decode()

    for name, engine in ENGINES.items():
        option = re.compile(f'<option value="{name}"[^>]*>{escape(engine.words)}</option>')
        assert bool(option.search(without)) is (engine not in needing_gpu())
        assert option.search(found)


def test_an_engine_on_gpus_is_refused_by_name_on_a_host_without_one(plan, host):
    for engine in (each.name for each in needing_gpu()):
        words = f"{engine}, which runs on {ENGINES[engine].device_words}, and {host.name}"
        with pytest.raises(DraftProblem, match=words):
            launchable_of(plan, Launch(run="endpoint", engine=engine))


def test_further_arguments_are_shown_refused_by_name_launched_and_cloned(gpu_plan, alice):
    url, words = f"/plans/{gpu_plan.pk}/launch/", "--stream-interval 4 --tool-call-parser hermes"

    def post(run: str, engine_args: str):
        return client_of(alice).post(
            url, {"run": run, "engine": "vllm", "engine_args": engine_args}
        )

    shown = unescape(post("command", words).content.decode())
    assert "-m vllm.entrypoints.cli.main serve MODEL_FOLDER --host 127.0.0.1 --port PORT" in shown
    assert f" {words}</pre>" in shown
    for line, said in (
        ("--trust-remote-code", "it runs code"),
        ("-tp 2", "set by pins.tensor_parallel_size"),
        ("--x 'y", "close the quote"),
    ):
        answer = post("endpoint", line)
        assert (answer.status_code, said in unescape(answer.content.decode())) == (422, True), line
    assert not Job.objects.exists()

    post("endpoint", words)
    job = Job.objects.get()
    assert job.spec["engine_args"] == words.split()
    assert launch_of_job(job).engine_args == words.split()
    page = unescape(client_of(alice).get(f"/jobs/{job.pk}/config/").content.decode())
    assert f" {words}</pre>" in page
    assert "sk-slipway" not in page


def test_an_engine_is_offered_on_gpus_of_its_vendors_alone(plan, host):
    for vendor in ("nvidia", "amd"):
        with_gpus(host, 1, vendor)
        plan_compute(plan)
        # An engine that takes a layout runs a plan on GPUs there, not on the processors.
        offered = [
            each
            for each in running_on("cpu", vendor)
            if each not in with_feature("parallel_sizes") or vendor in each.devices
        ]
        assert [*dict(launch_note(plan)["engines"])] == [each.name for each in offered], vendor
        for each in offered:
            assert each.devices & {"cpu", vendor}, (vendor, each.name)
    assert ENGINES["vllm"] not in offered


def test_an_engine_gets_the_plans_layout_limits_and_share_of_memory(gpu_plan):
    for engine in ON_GPUS:
        launch = launchable_of(gpu_plan, Launch(run="endpoint", engine=engine))

        options, best = launch.spec.engine_options, launch.best
        assert launch.spread == Spread(1, options.num_devices), engine
        assert options.tensor_parallel_size == (best.strategy.tensor_parallel_size or 1), engine
        assert LEAST_MEMORY_RATIO <= options.memory_ratio <= MOST_MEMORY_RATIO, engine
        assert launch.spec.max_concurrency == 4, engine


@pytest.mark.parametrize("engine", ON_GPUS)
def test_a_plan_divided_over_gpus_is_offered_as_an_endpoint_alone(gpu_plan, alice, engine):
    gpu_plan.draft["pins"] = {"tensor_parallel_size": 2}
    gpu_plan.save()
    plan_compute(gpu_plan)

    page = client_of(alice).get(f"/plans/{gpu_plan.pk}/edit/review/").content.decode()
    launch = launchable_of(gpu_plan, Launch(run="endpoint", engine=engine))

    assert re.findall(rf'<option value="({"|".join(ENGINES)})"', page) == [*ON_GPUS]
    assert "Run benchmark" not in page
    assert launch.spec.engine_options.tensor_parallel_size == 2
    assert launch.spread == Spread(1, 2)


def test_what_an_engine_is_not_started_with_is_refused_by_name(gpu_plan):
    for strategy, words in [
        ({"speculative": {"draft_model": "small"}}, "is small, which names no repository"),
        ({"context_parallel_size": 2}, "Pin context parallel to 1"),
        ({"kv_cache_dtype": "int4"}, "fp8, not in int4"),
    ]:
        best = launchable_of(gpu_plan, Launch(run="endpoint", engine="vllm")).best
        changed = best.model_copy(update={"strategy": Strategy.model_validate(strategy)})
        with pytest.raises(DraftProblem, match=words):
            options_of(changed)


def test_a_draft_model_that_the_plan_names_is_downloaded_by_its_name(gpu_plan):
    best = launchable_of(gpu_plan, Launch(run="endpoint", engine="vllm")).best
    drafting = {"speculative": {"draft_model": "Qwen/Qwen3-0.6B", "tokens": 40}}
    found = options_of(best.model_copy(update={"strategy": Strategy.model_validate(drafting)}))
    assert found.draft == Draft(model=HubModel(repository="Qwen/Qwen3-0.6B"), tokens=32)


def test_a_split_becomes_engines_that_read_and_others_that_write_on_vllm_alone(gpu_plan):
    best = launchable_of(gpu_plan, Launch(run="endpoint", engine="vllm")).best
    pools = {"prefill_devices": 2, "decode_devices": 4}
    strategy = {"disaggregated": pools, "tensor_parallel_size": 2, "data_parallel_size": 3}
    changed = best.model_copy(update={"strategy": Strategy.model_validate(strategy)})

    found = options_of(changed)

    assert (found.split.prefill_engines, found.split.decode_engines) == (1, 2)
    assert (found.tensor_parallel_size, found.data_parallel_size, found.num_devices) == (2, 1, 6)
    check_split("vllm", changed.strategy)
    for engine in ("sglang", "llamacpp", "slipway"):
        with pytest.raises(DraftProblem, match=r"its processes\. Choose the engine vLLM, or plan"):
            check_split(engine, changed.strategy)


def test_options_that_do_not_go_together_are_refused_by_name():
    for changes, words in [
        ({"draft": {"model": TRAINED}, "lookup_tokens": 3}, "only one can draft tokens"),
        ({"draft": {"model": TRAINED}, "split": {}}, "own cache does not travel"),
    ]:
        with pytest.raises(ValidationError, match=words):
            EngineOptions.model_validate(changes)
        options = {name: value for name, value in changes.items() if name != "draft"}
        with pytest.raises(
            ValidationError, match="by the engine sglang; leave it out, or choose vllm"
        ):
            ServeSpec(model=TRAINED, engine="sglang", engine_options=options)


@pytest.fixture
def gguf(plan, adapter, host, alice):
    """A GGUF file that the team's own job made of the model on which the adapter was trained."""
    job = plan_launch(plan=plan, by=alice)
    spec = CompressSpec(model=TRAINED, method="gguf").model_dump(mode="json")
    Job.objects.filter(pk=job.pk).update(kind="compress", spec=spec)
    return ArtefactModel(attempt_id=Attempt.objects.create(job=job, host=host, number=2).pk)


def test_a_gguf_file_has_the_adapters_of_the_model_that_it_was_made_of_and_no_other(
    plan, adapter, gguf
):
    (found,) = adapters_of(plan.team, gguf, producer_of(gguf))
    assert found.adapter.attempt_id == adapter.attempt_id
    assert adapters_of(Team.objects.create(name="else"), gguf, producer_of(gguf)) == ()
    spec = CompressSpec(model=TRAINED, method="gptq").model_dump(mode="json")
    Job.objects.filter(kind="compress").update(spec=spec)
    assert adapters_of(plan.team, gguf, producer_of(gguf)) == ()


def test_llama_cpp_is_not_offered_for_a_model_that_a_job_wrote_in_another_format(plan, gguf):
    TeamModel.objects.update(attempt_id=gguf.attempt_id, artefact_name=gguf.name)
    wish = Launch(run="endpoint", engine="llamacpp")
    assert launchable_of(plan, wish).spec.engine == "llamacpp"
    assert "llamacpp" in dict(launch_note(plan)["engines"])

    spec = CompressSpec(model=TRAINED, method="gptq").model_dump(mode="json")
    Job.objects.filter(kind="compress").update(spec=spec)
    with pytest.raises(DraftProblem, match="Compress the model with the method GGUF"):
        launchable_of(plan, wish)
    assert "llamacpp" not in dict(launch_note(plan)["engines"])


# A serve plan measured: the load that is asked for, what the plan says of it, what is refused


POSTED = {
    "run": "load",
    "arrivals": "closed",
    "points": "1, 2 4;8",
    "requests_per_repetition": "16",
    "repetitions": "2",
}


def under_load(**changes) -> Launch:
    form = form_of(**{**POSTED, **changes})
    if not form.is_valid():
        raise LaunchOptionError("form", str(form.errors.as_data()))
    return form.launch


def asked(**changes):
    return load_options(under_load(**changes))


def test_the_form_says_who_asks_and_how_often():
    load = asked()

    assert load.arrivals == ClosedLoop(concurrency=(1, 2, 4, 8))
    assert (load.requests_per_repetition, load.repetitions) == (16, 2)
    assert asked(arrivals="open", points="0.5 2").arrivals == OpenLoop(
        request_rate_per_second=(0.5, 2.0)
    )


def test_what_cannot_be_measured_is_refused_with_the_limits():
    for changes, words in [
        ({"points": "4, 2"}, "“Load levels” is 4, 2; give 1 to 12 rising numbers of clients"),
        ({"points": "many"}, "“Load levels” is many"),
        ({"points": "nan"}, "“Load levels” is nan"),
        ({"points": "1,5"}, "may be 1.5 or two levels"),
        ({"points": ""}, "“Load levels” is ; give"),
        ({"points": "1.5"}, "“Load levels” is 1.5"),
        ({"points": "0", "arrivals": "open"}, "greater than 0"),
        ({"arrivals": "flood"}, "is flood, which is not offered here"),
        ({"requests_per_repetition": "0"}, "must be a whole number from 1 to 100,000"),
        ({"repetitions": "99"}, "must be a whole number from 1 to 20"),
    ]:
        with pytest.raises(LaunchOptionError, match=words):
            asked(**changes)


SEARCH = {"levels": "search", "max_search_seconds": "30"}
CHAT = {"ttft_p95_seconds": 1.0, "tpot_p95_seconds": 0.05}


def test_a_search_begins_at_the_plans_own_load_with_the_plans_targets_and_its_budget(plan):
    launch = launchable_of(plan, under_load(**SEARCH))
    load = launch.spec.load
    assert load.arrivals == ClosedLoop(concurrency=(4,))
    assert (load.search.targets, load.search.max_points) == (CHAT, 12)
    assert load.search.max_seconds == 1800.0
    assert load.places(4) == load.search.highest == 1024.0  # memory holds more of this model

    limit = launch.prediction["slo_max_concurrency"]
    assert limit["unit"] == "clients"
    assert 1 <= limit["value"] <= 1024
    points = [row["point"] for row in launch.prediction[CURVE]["rows"]]
    assert {1.0, 4.0} <= set(points)
    assert points[-1] >= min(1024.0, limit["value"])

    launch = launchable_of(plan, under_load(**SEARCH, arrivals="open"))
    (rate,) = launch.spec.load.arrivals.points
    said = launch.best.performance.tokens_per_second / 32
    assert rate == pytest.approx(said, rel=0.01)
    assert launch.prediction["slo_max_requests_per_second"]["unit"] == "requests/s"

    plan.draft["percentile"] = "mean"
    plan.draft["workload"]["output_tokens"] = 1
    plan.save()
    plan_compute(plan)
    load = launchable_of(plan, under_load(**SEARCH)).spec.load
    assert load.search.targets == {"ttft_seconds": 1.0}


def test_what_cannot_be_searched_is_refused_by_the_name_of_its_field(plan, alice):
    for changes, words in (
        ({"levels": "search", "arrivals": "burst"}, "“Arrivals” is burst, and a search varies"),
        ({"levels": "search", "points": [1.0]}, "“Load levels” are given, and a search"),
        ({"points": [1.0], "max_search_seconds": 60.0}, "max_search_seconds is of a search"),
    ):
        with pytest.raises(InvalidProblem, match=words):
            launchable_of(plan, Launch(run="load", **changes))
    client = client_of(alice)
    page = client.get(f"/plans/{plan.pk}/edit/review/").content.decode()
    assert "highest load with TTFT p95 within 1 s and TPOT p95 within 0.05 s" in page

    plan.draft["latency_target"] = "none"
    plan.save()
    plan_compute(plan)
    page = client.get(f"/plans/{plan.pk}/edit/review/").content.decode()
    assert "A search needs a plan with a latency target." in page
    posted = {**POSTED, **SEARCH}
    page = client.post(f"/plans/{plan.pk}/launch/", posted, follow=True).content.decode()
    assert "latency target, and this plan has none" in page
    assert not Job.objects.exists()


def test_the_usual_sweep_doubles_and_the_curve_has_every_measured_point():
    assert [usual_points(each) for each in (1, 4, 6)] == ["1", "1, 2, 4", "1, 2, 4, 6"]
    assert len(usual_points(1024 * 1024).split(", ")) == 12
    assert curve_points((1.0, 4.0), whole=True) == [1.0, 2.0, 3.0, 4.0]
    assert len(curve_points((1.0, 4.0), whole=False)) == 18
    assert curve_points((2.0,), whole=False) == [2.0]


def test_a_launch_under_load_predicts_the_plans_clients_and_every_other_point(plan):
    launch = launchable_of(plan, under_load())

    said = launch.prediction
    rows = {row["point"]: row for row in said[CURVE]["rows"]}
    assert {1.0, 2.0, 4.0, 8.0} <= set(rows)
    assert said["ttft_seconds"]["value"] == pytest.approx(rows[4.0]["ttft_seconds"][0])
    assert rows[1.0]["tokens_per_second"][0] < rows[8.0]["tokens_per_second"][0]
    assert said["peak_memory_bytes"]["value"] > 0


def test_the_plan_has_a_figure_for_each_kind_of_arrival(plan):
    for kind, points in [("open", "0.5 1"), ("burst", "2 8")]:
        prediction = launchable_of(plan, under_load(arrivals=kind, points=points)).prediction
        assert prediction["ttft_seconds"]["value"] > 0, kind
        assert all("tokens_per_second" in row for row in prediction[CURVE]["rows"]), kind


def test_a_model_without_weights_is_not_put_under_load(serve_plan):
    with pytest.raises(DraftProblem, match="Load on an endpoint needs trained weights"):
        launchable_of(serve_plan, under_load())


def test_the_review_page_launches_it(plan, alice):
    client = client_of(alice)
    page = client.get(f"/plans/{plan.pk}/edit/review/").content.decode()

    client.post(f"/plans/{plan.pk}/launch/", {**POSTED, "key": "k1"})

    spec = BenchmarkSpec.model_validate(Job.objects.get().spec)
    assert 'value="1, 2, 4"' in page
    assert spec.load == asked()
    assert not spec.profile


def test_a_ticked_box_profiles_the_plain_measurement_and_bad_points_go_back(plan, alice):
    posted = {**POSTED, "points": "9, 3"}
    page = client_of(alice).post(f"/plans/{plan.pk}/launch/", posted, follow=True)
    assert "“Load levels” is 9, 3" in page.content.decode()
    assert not Job.objects.exists()

    client_of(alice).post(f"/plans/{plan.pk}/launch/", {"run": "job", "profile": "on"})
    spec = BenchmarkSpec.model_validate(Job.objects.get().spec)
    assert (spec.profile, spec.load) == (True, None)
