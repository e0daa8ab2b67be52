"""Models by their repository's name: named, planned, launched, refused."""

import json
from contextlib import nullcontext
from html import unescape
from http import HTTPStatus

import pytest

from planner.workload.resolve import resolve_model
from runners.hub.object_store import S3
from runners.hub.repository import store_repository
from runners.jobspec import GenerateSpec, HubModel, RandomModel, ServeSpec
from runners.plans.document import PLANS, ModelChoice
from runners.plans.launch import Launch, LaunchOptionError, check_used
from runners.plans.refusals import DraftProblem
from runners.plans.weights import repository_of, stated_repository, weights_for
from runners.shared.messages import CacheReport, LinkReport
from tests.hub.hub_server import Hub
from tests.hub.models import make_data_sets, write_files
from tests.webapp.conftest import client_of, enrol, make_beat
from webapp.accounts.secrets import secret_store
from webapp.agents.heartbeats import host_beat
from webapp.core.display import NBSP
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host, HostModel
from webapp.jobs.launching import (
    LaunchContext,
    launch_note,
    launch_of_job,
    launchable_of,
    plan_launch,
)
from webapp.jobs.models import Artefact, Attempt, Job, RepositoryUse
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan
from webapp.plans.places import question_of
from webapp.plans.repositories import RepositoryProblem, UnreachableError, with_config
from webapp.wizard.documents import (
    document_of,
    document_of_request,
    document_parse,
    draft_fill,
)
from webapp.wizard.drafts import serve_document, stored_draft

pytestmark = pytest.mark.django_db(databases="__all__")
TOKEN = "hf_of_the_team"
MIB = 2**20


@pytest.fixture
def plan_of_hub(team, alice, host, own_hub):
    """Return plans of a repository."""

    def make(goal: str = "generate", repository: str = "acme/tiny", **model) -> Plan:
        chosen = with_config(ModelChoice(repository=repository, **model), team)
        document = PLANS[goal](
            goal=goal,
            model=chosen,
            workload={"input_tokens": 16, "output_tokens": 8},
            hardware={"host": host.pk},
        )
        return Plan.objects.create(
            team=team, owner=alice, name="hub", draft=stored_draft(document, "demo")
        )

    return make


def test_a_name_becomes_a_plan_with_the_commit_and_a_job_of_it(plan_of_hub, alice, own_hub: Hub):
    plan = plan_of_hub()
    assert plan.document.model.config["hidden_size"] == 64
    assert plan.document.model.revision == own_hub.commit("acme/tiny")
    job = plan_launch(plan=plan, by=alice)
    assert job.spec["model"] == {
        "source": "hub", "repository": "acme/tiny", "revision": own_hub.commit("acme/tiny"),
        "weights": "safetensors", "file": "", "hub": "huggingface",
    }  # fmt: skip
    assert job.model_name == "tiny"


def test_a_catalog_model_is_downloaded_unless_its_weights_may_be_random(plan_of):
    plan = plan_of("generate", "catalog")
    assert launchable_of(plan).spec.model == HubModel(repository="HuggingFaceTB/SmolLM2-135M")
    random = launchable_of(plan, Launch(weights="random")).spec.model
    assert isinstance(random, RandomModel)
    assert random.config["hidden_size"] == 576


def test_an_evaluation_of_a_name_needs_no_job_before_it(plan_of_hub, alice, own_hub: Hub):
    commit = own_hub.commit("acme/tiny")
    for original in ("", f"acme/tiny@{commit}"):
        launch = Launch(run="evaluation", original=original)
        job = plan_launch(plan=plan_of_hub(), by=alice, launch=launch)
        assert (job.kind, job.spec["model"]["revision"]) == ("evaluate", commit)
        assert (job.spec["original"] or {}).get("revision", "") == original.partition("@")[2]
        assert launch_of_job(job).original == original
        assert ("duration_seconds" in job.prediction) is (not original)
    for name, words in (("acme/none", "has no repository"), ("acme/tiny-GGUF:Q8_0", "GGUF files")):
        with pytest.raises((DraftProblem, RepositoryProblem), match=words):
            plan_launch(
                plan=plan_of_hub(), by=alice, launch=Launch(run="evaluation", original=name)
            )
    with pytest.raises(
        LaunchOptionError, match="which is of the evaluation of a plan to generate"
    ):
        check_used("serve", Launch(run="evaluation"))
    with pytest.raises(LaunchOptionError, match="original is of the evaluation"):
        check_used("generate", Launch(original="acme/tiny"))


def test_the_review_of_a_generation_offers_the_evaluation(plan_of_hub, alice, own_hub: Hub):
    plan, client = plan_of_hub(), client_of(alice)
    page = client.get(f"/plans/{plan.pk}/edit/review/").content.decode()
    assert 'name="run" value="evaluation"' in page
    client.post(f"/plans/{plan.pk}/launch/", {"run": "evaluation", "original": "acme/tiny"})
    job = Job.objects.get()
    assert (job.kind, job.spec["original"]["repository"]) == ("evaluate", "acme/tiny")


def test_modelscope_is_asked_for_its_names_with_its_own_token(
    plan_of_hub, team, alice, own_hub, monkeypatch
):
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", own_hub.url)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    own_hub.tokens = own_hub.admitted = {"ms-0123456789"}
    own_hub.private = {"acme/tiny"}
    with pytest.raises(RepositoryProblem, match="secret MODELSCOPE_API_TOKEN"):
        plan_of_hub(repository="ms://acme/tiny")
    secret_store(team=team, name="MODELSCOPE_API_TOKEN", value="ms-0123456789", by=alice)
    plan = plan_of_hub(repository="https://modelscope.cn/models/acme/tiny/summary")
    assert plan.document.model.revision == own_hub.commit("acme/tiny")
    spec = launchable_of(plan).spec
    assert (spec.model.repository, spec.model.hub) == ("acme/tiny", "modelscope")
    assert spec.secrets == ("MODELSCOPE_API_TOKEN",)

    secret_store(team=team, name="HF_TOKEN", value="hf-0123456789", by=alice)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")  # of the site: names without a hub
    job = plan_launch(plan=plan_of_hub(), by=alice)
    assert job.spec["model"]["hub"] == "modelscope"
    assert job.spec["secrets"] == ["MODELSCOPE_API_TOKEN"]


def test_a_model_of_the_team_is_refused_by_the_field_that_the_body_has(alice, own_hub: Hub):
    for body, field, words in [
        ({"repository": "acme/none"}, "repository", "The field repository is not valid: "),
        ({"repository": "no name"}, "repository", "The field repository is not valid: "),
        ({}, "config", "give the content of the model's config.json, or repository"),
    ]:
        reply = client_of(alice).post("/api/v1/models", {"name": "x"} | body, "application/json")
        said = reply.json()
        assert (reply.status_code, said["errors"][0]["field"]) == (422, field), said
        assert words in said["detail"], said


def test_weights_that_own_jobs_do_not_read_are_refused_before_they_are_downloaded(
    plan_of_hub, own_hub: Hub
):
    config = json.loads((own_hub.folder / "acme/tiny/config.json").read_text())
    for method, is_read in (("awq", False), ("gptq", False), ("tiny", True)):
        stored = config | {"quantization_config": {"quant_method": method, "bits": 4}}
        if not is_read:
            write_files(own_hub.folder / f"acme/{method}", {"config.json": json.dumps(stored)})
        plan = plan_of_hub("serve", f"acme/{method}")
        for launch in (Launch(), Launch(run="endpoint")):
            if is_read:
                assert launchable_of(plan, launch).spec
                continue
            with pytest.raises(DraftProblem, match=f"quantised by {method}, which Slipway's own"):
                launchable_of(plan, launch)


def test_another_repository_of_a_catalog_model_is_judged_by_its_own_format(plan_of):
    for catalog_id, repository, method in (
        ("deepseek-ai/DeepSeek-V3", None, "fp8"),
        ("deepseek-ai/DeepSeek-V3", "unsloth/DeepSeek-V3-bf16", None),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-AWQ", "awq"),
        ("Qwen/Qwen3-8B-AWQ", None, "awq"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B@gptq", None),
        ("Qwen/Qwen3-8B", "acme/their-own", None),
    ):
        question = question_of(plan_of("generate", "catalog"))
        chosen = ModelChoice(source="catalog", catalog_id=catalog_id, repository=repository)
        question.document.model = chosen
        context = LaunchContext(question, None, None, repository_of(chosen), None, None)
        with (
            pytest.raises(DraftProblem, match=f"quantised by {method}")
            if method
            else nullcontext()
        ):
            weights_for(context.model, Launch(), context.config, context.stored_config)


def test_the_page_that_adds_a_model_takes_a_repository(alice, own_hub: Hub, monkeypatch):
    client, path = client_of(alice), "/models/new/"
    assert client.post(path, {"name": "By name", "repository": "acme/tiny"}).status_code == 302
    model = TeamModel.objects.get(name="By name")
    assert (model.source, model.revision) == ("hub", own_hub.commit("acme/tiny"))
    assert model.config["hidden_size"] == 64
    page = client.post(path, {"name": "x", "repository": "acme/none"})
    assert "has no repository" in str(page.context["form"].errors["repository"])
    config = json.dumps(model.config)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    page = client.post(path, {"name": "x", "repository": "acme/other"})
    assert "Give its config.json too" in str(page.context["form"].errors["repository"])
    sent = {"name": "Offline", "repository": "acme/other", "config": config}
    assert client.post(path, sent).status_code == 302
    assert TeamModel.objects.get(name="Offline").repository == "acme/other"


def test_what_a_name_says_of_the_weights_of_a_catalogs_model_is_kept(alice):
    for name, repository in {
        "ms://Qwen/Qwen3-0.6B": "ms://Qwen/Qwen3-0.6B",
        "https://huggingface.co/Qwen/Qwen3-0.6B/tree/v2": "Qwen/Qwen3-0.6B@v2",
        "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main": None,
        "Qwen/Qwen3-0.6B": None,
    }.items():
        body = {"goal": "serve", "model": name}
        made = client_of(alice).post("/api/v1/plans", body, "application/json").json()
        model = Plan.objects.get(pk=made["id"]).document.model
        assert model.catalog_id == "Qwen/Qwen3-0.6B", name
        assert stated_repository(model) == repository, name


def test_the_teams_token_goes_with_jobs_that_download_and_with_no_other(
    plan_of, plan_of_hub, own_hub, team, alice
):
    own_hub.tokens = {TOKEN}
    secret_store(team=team, name="HF_TOKEN", value=TOKEN, by=alice)
    assert launchable_of(plan_of_hub()).spec.secrets == ("HF_TOKEN",)
    assert launchable_of(plan_of("generate", "folder")).spec.secrets == ()


def test_the_review_says_what_the_download_adds_without_asking_the_hub(
    plan_of_hub, plan_of, host, other_host, own_hub: Hub
):
    plan = plan_of_hub()
    commit, asked = own_hub.commit("acme/tiny"), len(own_hub.log)

    def model(at: Host, size: int, **fields) -> HostModel:
        values = {"repository": "acme/tiny", "commit": commit, "is_complete": True, "num_files": 3}
        return HostModel.objects.create(host=at, size_bytes=size, **{**values, **fields})

    def said() -> str:
        return launch_note(plan)["text"].rpartition(". ")[2].replace(NBSP, " ")

    assert said().startswith("First it downloads what its cache lacks of acme/tiny"), said()
    model(other_host, 8 * MIB)  # which says how large it is
    assert said().startswith("First it downloads about 8.00 MiB of acme/tiny"), said()
    link = LinkReport(link="hub", address="h.lan", bytes_per_second=1e4, low=5e3, high=2e4,
                      num_transfers=4)  # fmt: skip
    cache = CacheReport(links=(link,))
    host_beat(host=host, beat=make_beat(cache=cache))
    takes = "about 14 min (7 to 28 min) at the 0.010 MB/s of this host's last 4 transfers from h"
    assert takes in launch_note(plan)["text"]
    host_beat(host=host, beat=make_beat(cache=CacheReport()))
    assert said().endswith("a repository of the Hub."), said()
    part = model(host, 2 * MIB, commit="", is_complete=False)
    assert said().startswith("First it downloads about 6.00 MiB of acme/tiny"), said()
    model(host, 8 * MIB, commit="f" * 40)  # another commit
    assert "about 6.00 MiB" in said()
    HostModel.objects.filter(pk=part.pk).update(commit=commit, is_complete=True)
    assert said() == "acme/tiny is in this host's cache: nothing is downloaded."
    assert len(own_hub.log) == asked

    plan, name = plan_of("generate", "catalog"), "HuggingFaceTB/SmolLM2-135M"
    assert said().startswith(f"First it downloads about 257 MiB of {name}"), said()
    model(host, 8 * MIB, repository=name)
    assert (
        said()
        == f"{name} is in this host's cache; if it has changed since, that is downloaded first."
    )


def test_home_plans_a_model_by_its_name_and_keeps_a_name_that_is_none(alice, host, own_hub: Hub):
    client = client_of(alice)
    for name, source in (("acme/tiny", "hub"), ("Qwen/Qwen3-0.6B", "catalog")):
        answer = client.post("/plans/by-name/", {"model": f" {name} "})
        plan = Plan.objects.latest("created_at")
        assert answer["Location"] == f"/plans/{plan.pk}/edit/review/"
        assert (plan.document.goal, plan.document.model.source) == ("serve", source)
        assert f"<dd>{name}" in client.get(answer["Location"]).content.decode()
    for name, is_noted in (("acme/tiny", False), ("acme/tiny-GGUF:Q8_0", True)):
        page = client.post("/plans/by-name/", {"model": name}, follow=True).content.decode()
        assert ("a GGUF file of another type" in page) is is_noted, name
    Host.objects.update(facts=host.facts | {"gpus": []})
    client.post("/plans/by-name/", {"model": "acme/tiny"})
    assert Plan.objects.latest("created_at").document.workload.concurrency == 1
    for name, words in (
        ("acme/none", "has no repository"),
        ("llama", "Name a repository of the Hub as owner/name."),
        ("", "No model is named"),
    ):
        before = Plan.objects.count()
        answer = client.post("/plans/by-name/", {"model": name}, follow=True)
        page = unescape(answer.content.decode())
        assert words in page, name
        assert "The field" not in page
        assert f'name="model" value="{name}"' in page
        assert 'name="model" value=""' in client.get("/").content.decode()
        assert Plan.objects.count() == before


def test_an_engine_gets_a_repository_of_the_files_that_it_reads(plan_of_hub):
    gguf = plan_of_hub("serve", "acme/tiny-GGUF:Q8_0")
    engine = Launch(run="endpoint", engine="llamacpp")
    spec = launchable_of(gguf, engine).spec
    assert isinstance(spec, ServeSpec)
    assert (spec.model.weights, spec.model.file) == ("gguf", "Q8_0")
    note = launch_note(gguf)
    assert [name for name, _ in note["engines"]] == ["llamacpp"]

    safe = plan_of_hub("serve", "acme/tiny")
    assert "llamacpp" not in [name for name, _ in launch_note(safe)["engines"]]
    for plan, launch, words in (
        (gguf, Launch(run="endpoint"), "acme/tiny-GGUF is a repository of GGUF files"),
        (gguf, Launch(), "A job reads safetensors files"),
        (safe, engine, "acme/tiny-GGUF:Q4_K_M"),
    ):
        with pytest.raises(DraftProblem, match=words):
            launchable_of(plan, launch)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acme/none", "has no repository 'acme/none'"),
        ("acme/tiny@gone", "revision 'gone'"),
        ("tiny", "name it as org/name"),
        ("acme/strange", "perceptron"),
        ("../etc/passwd", "name it as org/name"),
        ("acme/tiny-GGUF:Q6_K", "has no GGUF file 'Q6_K': name one of Q4_K_M .*, Q8_0 "),
        ("acme/tiny:Q8_0", "has no GGUF files"),
    ],
)
def test_a_name_that_is_none_is_refused_by_its_field(team, own_hub: Hub, name, words):
    with pytest.raises(RepositoryProblem, match=words) as refused:
        with_config(ModelChoice(source="hub", repository=name), team)
    assert refused.value.facts["errors"][0]["field"] == "model.repository"


def test_a_gated_repository_is_refused_until_the_teams_token_may_read_it(
    team, alice, own_hub: Hub
):
    own_hub.gated, own_hub.tokens = {"acme/tiny": "manual"}, {TOKEN}
    chosen = ModelChoice(source="hub", repository="acme/tiny")
    with pytest.raises(RepositoryProblem, match=r"is gated.*HF_TOKEN"):
        with_config(chosen, team)
    secret_store(team=team, name="HF_TOKEN", value=TOKEN, by=alice)
    own_hub.admitted = {TOKEN}
    assert with_config(chosen, team).revision == own_hub.commit("acme/tiny")


def test_a_wrong_variable_of_a_running_site_is_said_with_its_name(team, own_hub, monkeypatch):
    for name, value in (("HF_ENDPOINT", "mirror"), ("HF_TOKEN", "hf_\u00fc")):
        with monkeypatch.context() as own:
            own.setenv(name, value)
            with pytest.raises(UnreachableError, match=f"^{name} (is|has)"):
                with_config(ModelChoice(source="hub", repository="acme/tiny"), team)


def test_a_job_whose_plan_is_of_an_older_release_keeps_its_own_options(plan_of_hub, alice):
    plan = plan_of_hub("serve")
    job = plan_launch(plan=plan, by=alice, launch=Launch(weights="random", max_retries=2))
    assert launch_of_job(job).weights == "random"
    plan.draft["goal"] = "dance"
    plan.save(update_fields=["draft"])
    job = Job.objects.get(pk=job.pk)
    assert (launch_of_job(job).weights, launch_of_job(job).max_retries) == ("published", 2)
    assert client_of(alice).get(f"/api/v1/jobs/{job.pk}").status_code == HTTPStatus.OK


def test_without_the_hub_a_given_config_stays_and_the_host_decides(team, alice, plan_of):
    chosen = ModelChoice(source="hub", repository="acme/tiny")
    with pytest.raises(UnreachableError):
        with_config(chosen, team)
    kept = chosen.with_values(config={"model_type": "perceptron"})
    with pytest.raises(RepositoryProblem, match="perceptron"):
        with_config(kept, team)
    job = plan_launch(plan=plan_of("generate", "catalog"), by=alice)
    assert (job.spec["model"]["source"], job.spec["model"]["revision"]) == ("hub", "")


def test_a_document_names_a_repository_and_goes_to_another_site(team, alice, host, own_hub: Hub):
    sent = {
        "goal": "generate",
        "model": "acme/tiny",
        "hardware": {"host": host.slug},
        "workload": {"input_tokens": 16, "output_tokens": 8},
    }

    def filled(document: dict) -> Plan:
        plan = Plan(team=team, owner=alice, draft=stored_draft(serve_document(None)))
        draft_fill(plan, document_parse(document))
        return plan

    plan = filled(sent)
    again = filled(document_of(plan))
    assert again.document.model == plan.document.model
    assert plan.document.model.revision == own_hub.commit("acme/tiny")
    with pytest.raises(InvalidProblem, match="acme/none"):
        filled({**sent, "model": "acme/none"})


def test_the_wizard_takes_a_repository(plan_of, alice, own_hub: Hub):
    plan, client = plan_of("generate", "demo"), client_of(alice)
    page = f"/plans/{plan.pk}/edit/model/"
    refused = client.post(page, {"source": "hub", "repository": "acme/none"})
    assert "has no repository" in refused.content.decode()
    taken = client.post(page, {"source": "hub", "repository": "acme/tiny"})
    assert taken.status_code == 302
    plan.refresh_from_db()
    assert plan.document.model.config["hidden_size"] == 64
    assert isinstance(launchable_of(plan).spec, GenerateSpec)


def test_a_repository_has_the_adapters_that_jobs_on_the_host_trained_on_it(
    plan_of_hub, team, alice, host
):
    far, _ = enrol(team, name="far")
    tuned = plan_launch(plan=plan_of_hub(), by=alice)
    other = plan_launch(plan=plan_of_hub(repository="acme/other"), by=alice)
    for number, (job, place) in enumerate(((tuned, host), (tuned, far), (other, host)), start=7):
        attempt = Attempt.objects.create(job=job, host=place, number=number)
        Artefact.objects.create(
            attempt=attempt, name="adapter", kind="adapter", total_bytes=1, facts={"base": {}}
        )
    served = launch_note(plan_of_hub("serve"))
    assert served["adapters"] == "1"


def test_a_plan_that_the_command_line_keeps_is_launched_by_the_repositorys_name(
    plan_of_hub, team, alice, own_hub: Hub
):
    request = question_of(plan_of_hub("serve")).request
    assert resolve_model(request.named_model).id == "acme/tiny"
    document, _ = document_of_request(request.model_dump(mode="json"))
    again = Plan(team=team, owner=alice, draft=stored_draft(serve_document(None)))
    draft_fill(again, document_parse(document))
    assert (again.document.model.source, again.document.model.repository) == ("hub", "acme/tiny")
    assert again.document.model.revision == own_hub.commit("acme/tiny")


@pytest.fixture
def training_on(team, alice, host, own_hub):
    """Return plans of a fine-tuning on a data set of the Hub."""
    make_data_sets(own_hub.folder)

    def make(**data: str) -> Plan:
        document = PLANS["finetune"](
            goal="finetune",
            model=with_config(ModelChoice(repository="acme/tiny"), team),
            workload={"sequence_length": 64, "global_batch_size": 2, "tokens": 1000, **data},
            hardware={"host": host.pk},
        )
        return Plan.objects.create(
            team=team, owner=alice, name="data", draft=stored_draft(document, "demo")
        )

    return make


def test_a_data_set_is_launched_at_its_commit_and_said_before(training_on, alice, own_hub: Hub):
    plan = training_on(data_repository="hf.co/datasets/tiny/chats")
    assert "the split train of tiny/chats, a data set of the Hub" in launch_note(plan)["text"]
    of_subset = training_on(data_repository="tiny/chats", data_subset="en")
    assert "the subset en, split train of tiny/chats" in launch_note(of_subset)["text"]
    job = plan_launch(plan=plan, by=alice)
    assert job.spec["data"] == {
        "source": "hub", "repository": "datasets/tiny/chats", "subset": "", "split": "train",
        "revision": own_hub.commit("datasets/tiny/chats"), "format": None,
        "columns": [], "records": None,
    }  # fmt: skip
    used = {(each.repository, each.revision) for each in RepositoryUse.objects.filter(job=job)}
    assert ("datasets/tiny/chats", own_hub.commit("datasets/tiny/chats")) in used


@pytest.mark.parametrize(
    ("data", "fault", "words"),
    [
        ({"data_repository": "tiny/none"}, {}, "has no repository 'datasets/tiny/none'"),
        ({"data_repository": "tiny/chats@gone"}, {}, "revision 'gone'"),
        ({"data_repository": "tiny/chats:dev"}, {}, "no split 'dev': it has test, train"),
        ({"data_repository": "tiny/chats@{commit}:dev"}, {}, "no split 'dev': it has test, train"),
        ({"data_repository": f"tiny/chats@{'a' * 40}"}, {}, f"has no repository .*'{'a' * 40}'"),
        (
            {"data_repository": "tiny/chats@{commit}"},
            {"gated": {"datasets/tiny/chats": "manual"}},
            "/datasets/tiny/chats says who may read it",
        ),
        ({"data_repository": "tiny/chats", "data_subset": "en"}, {}, "no subset 'en'"),
        ({"data_repository": "tiny/scripted"}, {}, "which never runs here"),
        (
            {"data_repository": "tiny/chats"},
            {"gated": {"datasets/tiny/chats": "manual"}},
            "/datasets/tiny/chats says who may read it",
        ),
        (
            {"data_repository": "tiny/chats"},
            {"renamed": {"datasets/tiny/chats": "datasets/tiny/talks"}},
            "it is 'datasets/tiny/talks' now",
        ),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused_by_its_field(
    training_on, alice, own_hub: Hub, data, fault, words
):
    commit = own_hub.commit("datasets/tiny/chats")
    plan = training_on(**{name: text.format(commit=commit) for name, text in data.items()})
    for name, value in fault.items():
        setattr(own_hub, name, value)
    with pytest.raises(RepositoryProblem, match=words) as refused:
        plan_launch(plan=plan, by=alice)
    assert refused.value.facts["errors"][0]["field"] == "workload.data_repository"
    page = client_of(alice).post(f"/plans/{plan.pk}/launch/", {"run": "job"}).content.decode()
    assert refused.value.sentence in unescape(page)
    assert "The field workload" not in page
    assert not Job.objects.exists()


def test_a_gated_data_set_is_read_with_the_teams_token_which_goes_with_the_job(
    training_on, team, alice, own_hub: Hub
):
    own_hub.gated, own_hub.tokens = {"datasets/tiny/chats": "auto"}, {TOKEN}
    own_hub.admitted = {TOKEN}
    secret_store(team=team, name="HF_TOKEN", value=TOKEN, by=alice)
    job = plan_launch(plan=training_on(data_repository="tiny/chats"), by=alice)
    assert job.spec["secrets"] == ["HF_TOKEN"]


def test_without_the_hub_the_host_looks_a_data_set_up(training_on, alice, monkeypatch):
    plan = training_on(data_repository="tiny/chats")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert plan_launch(plan=plan, by=alice).spec["data"]["revision"] == ""


def test_a_folder_of_an_object_store_is_launched_with_the_teams_key_and_kept(
    plan_of, host, team, alice
):
    url = "s3://lab/models/tiny"
    plan = plan_of("generate", "folder")
    for name in S3.secrets[:2]:
        secret_store(team=team, name=name, value="AKIA0123456789", by=alice)
    assert launchable_of(plan).spec.secrets == ()
    config = plan.document.model.config
    document = {
        "goal": "generate", "model": {"path": url, "config": config},
        "workload": {"input_tokens": 16, "output_tokens": 8}, "hardware": {"host": host.slug},
    }  # fmt: skip
    reply = client_of(alice).post("/api/v1/jobs", document, "application/json").json()
    job = Job.objects.get(pk=reply["job"]["id"])
    assert job.spec["model"] == {"source": "folder", "path": url}
    assert sorted(job.spec["secrets"]) == sorted(S3.secrets[:2])
    assert [use.repository for use in RepositoryUse.objects.filter(job=job)] == [
        store_repository(url)
    ]
    for wrong, words in (("gs://lab/tiny", "hosts do not read"), ("s3://L/a", "small letters")):
        document["model"]["path"] = wrong
        reply = client_of(alice).post("/api/v1/jobs", document, "application/json").json()
        assert reply["errors"][0]["field"] == "model.path", reply
        assert words in reply["detail"], reply
