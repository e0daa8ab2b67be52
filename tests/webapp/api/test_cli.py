"""The commands of a server, against the site itself: output, exit codes, and the token's scope."""

import http.server
import io
import json
import re
import shlex
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import typer
import yaml

from runners.cli import main as cli
from runners.cli.config import config_path
from runners.cli.output import state_words
from runners.cli.server import COMPLETION_SECONDS
from runners.client.generated import Slipway
from runners.client.transport import Event
from runners.shared.messages import EnvironmentState
from tests.hub.fixtures import CONFIG as HUB_CONFIG
from tests.hub.models import write_files
from tests.webapp.api.operations import operations
from tests.webapp.api.test_client import by_django
from tests.webapp.api.test_mcp import agent
from tests.webapp.conftest import (
    EXIT_OK,
    STARTED,
    batch_of,
    claim,
    client_of,
    make_beat,
    make_microbench,
)
from tests.webapp.tunings import test_tunings
from tests.webapp.wizard.conftest import Walker
from tests.webapp.workflows.test_workflows import CHAIN, end
from webapp.accounts.models import AccessToken, Membership, StoredReply
from webapp.accounts.tokens import token_make
from webapp.agents.environments import orders_of
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.api import library
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host, HostModel
from webapp.jobs.models import Attempt, Job, LaunchRequest
from webapp.modelhub.models import TeamModel
from webapp.plans import repositories
from webapp.plans.models import Plan
from webapp.plans.repositories import RepositoryProblem, UnreachableError
from webapp.plans.team_models import team_model_ref
from webapp.tunings.models import Tuning
from webapp.workflows.models import Workflow

pytestmark = pytest.mark.django_db(databases="__all__")
LOGGED = re.compile(
    r"^\d{4}-\d\d-\d\dT[\d:.]+Z \[.*\n", re.MULTILINE
)  # the site's log, in the same process
CLIENT = httpx.Client
DONE, FAILED, USAGE, NOTHING_FITS, DENIED = range(5)
PRETRAIN = {"goal": "pretrain", "model": "demo", "workload": {"time_budget_seconds": 60}}


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """A user's folders, a client that reaches the site, and no terminal."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("SLIPWAY_SERVER", raising=False)
    monkeypatch.delenv("SLIPWAY_TOKEN", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest's workers set it
    client = httpx.Client

    def reaching(**_options):
        return client(transport=httpx.MockTransport(by_django))

    monkeypatch.setattr("runners.client.transport.httpx.Client", reaching)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command; return its exit code, standard output and standard error."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return code, LOGGED.sub("", out), err

    return call


@pytest.fixture
def logged_in(run, alice, team) -> None:
    text = token_make(team=team, by=alice, name="cli", scope="launch")[1]
    code, out, err = run("login", "http://testserver", stdin=f"{text}\n")
    assert (code, "as alice in" in out) == (DONE, True), err


@pytest.fixture
def job_file(tmp_path, host):
    path = tmp_path / "job.yaml"
    document = {**PRETRAIN, "hardware": {"host": host.slug}, "launch": {"name": "night run"}}
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_login_is_kept_for_its_owner_alone_and_a_wrong_token_is_denied(run, logged_in):
    assert config_path().stat().st_mode & 0o077 == 0
    code, out, _ = run("whoami", "-o", "json")
    assert (code, json.loads(out)["scope"]) == (DONE, "launch")
    code, _, err = run("login", "http://testserver", "--token", "slp_no")
    assert (code, "No valid access token" in err) == (DENIED, True)
    code, _, err = run("login", "http://testserver", "--token", 'a"b')
    assert (code, "begins with slp_" in err) == (USAGE, True)
    assert run("logout")[0] == DONE
    code, _, err = run("ps")
    assert (code, "slipway login SERVER" in err) == (DENIED, True)


def test_a_file_is_launched_as_the_wizard_would_and_followed_to_its_end(
    run, logged_in, job_file, host, monkeypatch
):
    code, out, err = run("launch", "-f", job_file, "-d", "--yes")
    assert (code, out.strip()) == (DONE, Job.objects.get().pk), err
    job = Job.objects.get()
    assert (job.name, job.spec["time_budget_seconds"]) == ("night run", 60.0)
    code, out, _ = run("ps")
    assert job.pk in out
    assert "night run" in out
    code, out, err = run("logs", job.pk)
    assert (code, out, err) == (DONE, "", f"No lines: the job is {state_words(job.state)}.\n")
    attempt = Attempt.objects.get()
    log = ("log", {"stream": "stdout", "text": "step 1\nstep 2\n"})
    claim(attempt)
    batch = batch_of(attempt, ("started", STARTED), log, ("exited", EXIT_OK))
    events_accept(host=attempt.host, batch=batch)
    code, out, _ = run("logs", "night run", "-n", "2")
    assert (code, out.splitlines()[0]) == (DONE, "step 2")
    code, _, err = run("metrics", job.pk, "nosuch")
    assert (code, "'nosuch', which this job has not reported; it has none yet" in err) == (
        FAILED,
        True,
    )
    code, out, _ = run("get", "night run")
    assert (code, "succeeded" in out) == (DONE, True)
    for wait in ((), ("--wait",)):
        code, out, err = run("stop", job.pk, *wait)
        assert (code, out) == (DONE, f"night run ({job.pk}) has ended already: succeeded.\n"), err
    assert json.loads(run("stop", job.pk, "-o", "json")[1])["state"] == "succeeded"
    out = run("events", job.pk)[1]
    assert "job.state" in out
    assert "queued, by alice" in out
    assert "progress" not in out
    code, _, err = run("logs", job.pk, "--rank", "1")
    assert (code, "no host of rank 1; the job runs on 1" in err) == (USAGE, True), err
    lines = json.loads(run("logs", job.pk, "-o", "json")[1])["lines"]
    assert "step 2" in [each["text"] for each in lines]
    followed = [Event("log", {"text": "step 1"}), Event("log", {"text": "step 2"})]
    monkeypatch.setattr(Slipway, "follow_job", lambda *_, **_options: iter(followed))
    out = run("logs", job.pk, "-f", "--grep", "2", "-o", "json")[1]
    assert [json.loads(line) for line in out.splitlines()] == [{"text": "step 2"}]
    out = run("logs", job.pk, "-f", "-o", "yaml")[1]
    assert list(yaml.safe_load_all(out)) == [each.data for each in followed]
    code, _, err = run("resume", job.pk)
    assert (code, "has done all that it was to do. Run it again" in err) == (FAILED, True)
    code, out, _ = run("rerun", job.pk, "-d", "-o", "json")
    again = Job.objects.order_by("created_at").last()
    assert (code, json.loads(out)["id"], again.spec) == (DONE, again.pk, job.spec)
    code, out, _ = run("compare", job.pk, again.pk)
    assert (code, "night run (copy)" in out) == (DONE, True)


def test_an_ambiguous_name_is_refused_with_the_ids_and_states_and_nothing_is_done(
    run, logged_in, job_file, host, monkeypatch
):
    ids = [run("launch", "-f", job_file, "-y", "-d")[1].strip() for _ in range(2)]
    for command in (
        ("stop", "night run", "-y"), ("delete", "night run", "-y"), ("resume", "night run"),
        ("get", "night run"), ("logs", "night run"), ("stop", "night", "-y"),
    ):  # fmt: skip
        code, out, err = run(*command)
        assert (code, out) == (FAILED if command[1] == "night" else USAGE, ""), err
        assert all(re.search(rf"{each}  night run  (preflight|queued), ", err) for each in ids)
    assert set(Job.objects.values_list("pk", flat=True)) == set(ids)
    assert not Job.objects.filter(state__in=("stopping", "stopped")).exists()
    Job.objects.filter(pk=ids[0]).update(name="other", state="stopped")
    code, out, err = run("delete", "other", "--yes")
    assert (code, out) == (DONE, f"Deleted other ({ids[0]}).\n"), err
    code, out, err = run("plans", "delete", Plan.objects.first().pk, "-y")
    assert (code, out.startswith("Deleted ")) == (DONE, True), err
    listed = Slipway.list_hosts

    def doubled(client, **query):
        page = listed(client, **query)
        names = [{"slug": slug, "name": "Box"} for slug in ("a", "b")]
        return page.model_copy(
            update={"items": [page.items[0].model_copy(update=each) for each in names]}
        )

    monkeypatch.setattr(Slipway, "list_hosts", doubled)
    code, _, err = run("launch", "-f", job_file, "-y", "--on", "Box")
    assert (code, "2 hosts are named 'Box'" in err, "\n  a  ready" in err) == (USAGE, True, True)


def test_a_plan_made_without_a_server_is_launched_on_its_host(run, logged_in, host):
    code, out, err = run(
        "plan",
        "generate",
        "llama-3.2-1b",
        "--on",
        "h100-sxm",
        "--output-tokens",
        "32",
        "-o",
        "json",
    )
    assert code == DONE, err
    plan = json.loads(out)["id"]
    code, _, err = run("launch", plan, "--on", host.slug, "-y", "-d")
    assert code == DONE, err
    made = Plan.objects.get()
    assert made.document.hardware.host == host.pk
    assert made.document.workload.output_tokens == 32
    assert Job.objects.get().plan_id == made.pk


@pytest.mark.parametrize("on", ["rtx-4090", "host"])
def test_a_repository_is_planned_and_launched_by_its_name(run, logged_in, host, own_hub, on):
    """On a device of the catalog the command line plans, on a host the server."""
    place = host.slug if on == "host" else on
    code, out, err = run("plan", "serve", "acme/tiny", "--on", place, "-o", "json")
    assert code == DONE, err
    kept = json.loads(out)
    assert kept["request"]["model"] == json.loads(HUB_CONFIG)
    code, _, err = run("launch", kept["id"], "--on", host.slug, "-y", "-d")
    assert code == DONE, err
    model = Job.objects.get().spec["model"]
    assert (model["repository"], model["revision"]) == ("acme/tiny", own_hub.commit("acme/tiny"))


def test_nothing_is_launched_unasked_or_where_nothing_fits(run, logged_in, job_file, tmp_path):
    code, _, err = run("launch", "-f", job_file)
    assert (code, "repeat it with --yes" in err) == (USAGE, True)
    big = tmp_path / "big.yaml"
    big.write_text("goal: serve\nmodel: meta-llama/Llama-3.1-405B\nhardware: {device: rtx-4090}\n")
    code, _, err = run("launch", "-f", big, "-y")
    assert code == NOTHING_FITS, err
    code, _, err = run("launch", "-f", job_file, "--set", "workload.sequence_length=0", "-y")
    assert (code, "sequence_length" in err) == (USAGE, True)
    code, _, err = run("launch")
    assert (code, "name a PLAN" in err) == (USAGE, True)
    assert not Job.objects.exists()


def test_a_launch_that_does_not_happen_leaves_no_plan(
    run, logged_in, job_file, tmp_path, monkeypatch
):
    launch = ("launch", "-f", job_file)
    code, out, err = run(*launch, "--dry-run")
    assert (code, "Fits" in err, "Nothing was launched or kept" in out) == (DONE, True, True), err
    assert json.loads(run(*launch, "--dry-run", "-o", "json")[1])["verdict"] == "fits"
    big = tmp_path / "big.yaml"
    big.write_text("goal: serve\nmodel: meta-llama/Llama-3.1-405B\nhardware: {device: rtx-4090}\n")
    assert run("launch", "-f", big, "--dry-run")[0] == NOTHING_FITS
    assert run("launch", "-f", big, "-y")[0] == NOTHING_FITS
    assert run(*launch)[0] == USAGE  # nobody can be asked

    def answered_no(*_arguments, **_options):
        raise typer.Abort

    monkeypatch.setattr("runners.cli.launch.confirm", answered_no)
    assert run(*launch)[0] == 130
    assert not Plan.objects.exists()


def test_a_launch_over_the_budget_names_the_command_that_requests_an_approval(
    run, logged_in, alice, team, job_file, tmp_path
):
    text = token_make(team=team, by=alice, name="agent", scope="launch", budget_gpu_hours=1)[1]
    plan_file = tmp_path / "plan.yaml"
    document = yaml.safe_load(job_file.read_text())
    plan_file.write_text(yaml.safe_dump({**document, "launch": None}))
    kept = json.loads(run("api", "create_plan", "--body", plan_file)[1])["id"]
    assert run("login", "http://testserver", "--token", text)[0] == DONE
    for what in (("-f", str(job_file)), (kept,)):
        code, _, err = run("launch", *what, "--hours", "50", "-y")
        command = re.search(r"`slipway (.*)`", err)[1]
        asking = ["launch", *what, "--hours", "50"]
        assert (code, shlex.split(command)) == (DENIED, [*asking, "--request-approval", "REASON"])
        assert "{plan_id}" not in err
        assert list(Plan.objects.values_list("pk", flat=True)) == [kept]
    code, out, err = run(*shlex.split(command), "-y")
    request = LaunchRequest.objects.get()
    assert (code, out.strip(), request.reason) == (DONE, request.pk, "REASON"), err
    assert (request.plan_id, "http://testserver/approvals/" in err) == (kept, True)
    assert not Job.objects.exists()


def test_a_requested_approval_is_waited_for_listed_and_withdrawn(
    run, logged_in, alice, bob, team, job_file, monkeypatch
):
    launch = ("launch", "-f", str(job_file), "-y", "--request-approval", "for the paper")
    code, _, err = run("launch", "-f", str(job_file), "--wait", "-y")
    assert (code, "--wait needs --request-approval" in err) == (USAGE, True)

    def decide(state: str) -> None:
        request = LaunchRequest.objects.get(state="waiting")
        if state == "approve":
            client_of(bob).post(f"/approvals/{request.pk}/approve/")
        else:
            assert run("approvals", state, request.pk, "-y", "--reason", "a typo")[0] == DONE

    monkeypatch.setattr("time.sleep", lambda _seconds: decide("approve"))
    code, out, err = run(*launch, "--wait", "--detach")
    assert (code, out.strip()) == (DONE, Job.objects.get().pk), err
    monkeypatch.setattr("time.sleep", lambda _seconds: decide("withdraw"))
    code, out, err = run(*launch, "--wait", "--detach")
    assert (code, out, "was withdrawn by alice: a typo" in err) == (DENIED, "", True), err
    assert run(*launch)[0] == DONE
    request = LaunchRequest.objects.get(state="waiting")
    assert request.pk in run("approvals", "list")[1]
    listed = json.loads(run("approvals", "list", "-o", "json")[1])
    assert [each["reason"] for each in listed["items"]] == ["for the paper"]
    assert run("approvals", "withdraw", request.pk, "-y")[0] == DONE
    assert run("approvals", "withdraw", request.pk, "-y")[0] != DONE


def test_ps_into_a_pipe_has_one_line_for_each_job_in_aligned_columns(
    run, logged_in, job_file, monkeypatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    names = ("a name of many words " * 5).strip(), "short"
    for name in names:
        assert run("launch", "-f", job_file, "-y", "-d", "--name", name)[0] == DONE
    head, *rows = run("ps")[1].splitlines()
    assert [row[: head.index("KIND")].split(maxsplit=1)[1].strip() for row in rows] == [
        *names[::-1]
    ]
    assert {row[head.index("KIND") :].split()[0] for row in rows} == {"train"}
    monkeypatch.setenv("COLUMNS", "80")
    assert len(run("ps")[1].splitlines()) > 3


def test_a_launch_with_a_key_is_repeated_safely(run, logged_in, job_file):
    launch = ("launch", "-f", job_file, "-y", "-d", "--key", "night")
    code, _, err = run(*launch, "--hours", "-1")  # refused: the key stays free
    assert (code, Plan.objects.exists()) == (USAGE, False), err
    ids = {run(*launch)[1].strip() for _ in range(3)}
    assert ids == {Job.objects.get().pk}
    code, _, err = run(*launch, "--set", "workload.time_budget_seconds=120")
    assert (code, "was used for another request" in err) == (USAGE, True)
    assert run(*launch, "--hours", "2")[0] == USAGE
    assert Plan.objects.get().pk == Job.objects.get().plan_id
    StoredReply.objects.all().delete()  # as a day later
    assert {run(*launch)[1].strip()} == ids
    assert Plan.objects.get().pk == Job.objects.get().plan_id
    code, _, err = run("launch", "-f", job_file, "-y", "--key", "x" * 65)
    assert (code, "--key has 65 characters; it can have 1 to 64" in err) == (USAGE, True)


def test_ctrl_c_ends_the_command_and_not_the_job(run, logged_in, job_file, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Slipway, "follow_job", interrupted)
    code, _, err = run("launch", "-f", job_file, "-y")
    assert (code, "The job goes on" in err) == (130, True)
    assert Job.objects.get().state != "stopped"


def test_a_role_or_scope_that_is_too_low_is_denied(run, logged_in, host):
    code, _, err = run("hosts", "drain", host.slug)
    assert (code, "needs the scope admin" in err) == (DENIED, True)
    code, _, err = run("api", "list_audit", "-o", "json")
    assert (code, json.loads(err)["status"]) == (DENIED, 403)


def test_errors_as_json_are_the_problem_document_of_the_server_or_of_its_form(
    run, alice, team, logged_in, job_file
):
    text = token_make(team=team, by=alice, name="agent", scope="launch", budget_gpu_hours=0.001)[1]
    assert run("login", "http://testserver", "--token", text)[0] == DONE
    for command, status, code, exit_code, more in (
        (
            ("api", "create_plan", "goal=serve", "model=demo", "x=1"),
            422,
            "invalid",
            USAGE,
            "errors",
        ),
        (("launch", "-f", job_file, "-y"), 409, "over_budget", DENIED, "needed_gpu_hours"),
        (("get", "nothing"), 404, "not_found", FAILED, "errors"),
        (("get", "0" * 26), 404, "not_found", FAILED, "detail"),
        (("data", "add", "nothing.jsonl"), 422, "invalid", USAGE, "errors"),
    ):
        done, _, err = run(*command, "-o", "json")
        assert done == exit_code, err
        problem = json.loads(err)
        assert (problem["status"], problem["code"]) == (status, code), problem
        assert problem[more], problem


def test_a_plan_comes_as_yaml_and_goes_back_the_same(run, logged_in, job_file, tmp_path):
    run("launch", "-f", job_file, "-y", "-d")
    first = Plan.objects.get()
    code, out, _ = run("plans", "yaml", first.pk)
    assert code == DONE
    path = tmp_path / "again.yaml"
    path.write_text(out)
    assert run("launch", "-f", path, "-y", "-d")[0] == DONE
    one, other = Job.objects.order_by("created_at")
    assert one.spec == other.spec
    assert run("plans", "list")[1].count("fits") == 2
    schema = json.loads(run("plans", "schema")[1])
    plans, workflows = schema["anyOf"]
    assert plans["discriminator"]["propertyName"] == "goal"
    assert workflows["$ref"].endswith("/WorkflowDocument")
    Plan.objects.exclude(pk=first.pk).update(series=first.series, version=2)
    assert run("plans", "delete", first.pk, "-y")[1].endswith(f"({first.pk}).\n")
    assert not Plan.objects.filter(deleted_at=None).exists()


def test_every_operation_has_a_way_by_name(run, logged_in, host, tmp_path):
    code, out, _ = run("api", "-o", "table")
    assert {each.name for each in operations()} <= set(out.split())
    code, out, _ = run("api", "get_host", f"slug={host.slug}")
    assert (code, json.loads(out)["slug"]) == (DONE, host.slug)
    code, out, err = run(
        "api", "create_plan", "goal=serve", "model=demo", 'hardware={"device": "h200"}'
    )
    assert (code, json.loads(out)["document"]["hardware"]["device"]) == (DONE, "h200-sxm-141gb"), (
        err
    )
    code, _, err = run("api", "get_hosts")
    assert (code, "nearest: get_host" in err) == (USAGE, True)
    code, _, err = run("api", "get_host")
    assert (code, "slug is missing" in err) == (USAGE, True)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "number {number}"}}\n' for number in range(40)))
    code, out, err = run("data", "add", path)
    assert (code, "40 records" in out) == (DONE, True), err
    assert "a.jsonl" in run("data", "list")[1]
    data_id = out.split()[0]
    assert run("data", "delete", data_id, "-y")[:2] == (DONE, f"Deleted a.jsonl ({data_id}).\n")


class Web(http.server.ThreadingHTTPServer):
    """A server with a reply by path, a status and a text; for other paths 404, or silence."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), WebAnswer)
        self.replies: dict[str, tuple[int, str]] = {}
        self.seen: dict[str, str | None] = {}  # path: its Authorization
        self.is_silent = False
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class WebAnswer(http.server.BaseHTTPRequestHandler):
    server: Web

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.seen[path] = self.headers["authorization"]
        if self.server.is_silent:
            self.server.released.wait(20)
            return
        status, text = self.server.replies.get(path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def as_admin(run, logged_in, alice, team) -> None:
    Membership.objects.filter(user=alice).update(role="admin")
    text = token_make(team=team, by=alice, name="admin", scope="admin")[1]
    assert run("login", "http://testserver", "--token", text)[0] == DONE


def test_a_token_is_made_with_a_budget_that_is_listed_and_shown_to_its_bearer(run, as_admin):
    code, out, err = run("tokens", "make", "agent", "--scope", "launch", "--budget", "2.5")
    assert code == DONE, err
    assert AccessToken.objects.get(name="agent").budget_gpu_hours == 2.5
    assert re.search(r"agent .*2\.5 GPU-h", run("tokens", "list")[1])
    assert run("login", "http://testserver", "--token", out.strip())[0] == DONE
    assert "2.5 of 2.5 GPU-hours are left" in run("whoami")[1]
    run("logout")


def test_new_things_are_added_and_the_old_verbs_still_work(run, as_admin):
    for verb in ("add", "make"):
        assert run("tokens", verb, f"by {verb}")[0] == DONE
    token_id = AccessToken.objects.get(name="by add").pk
    code, _, err = run("tokens", "revoke", token_id)
    assert (code, "repeat it with --yes" in err) == (USAGE, True)
    assert run("tokens", "revoke", token_id, "--yes")[0] == DONE
    for verb in ("add", "set"):
        assert run("secrets", verb, f"BY_{verb.upper()}", stdin="hf_0123456789")[0] == DONE
    assert " make " not in run("tokens", "--help")[1]
    assert " set " not in run("secrets", "--help")[1]


def test_a_budget_that_cannot_be_is_refused_by_its_field(run, as_admin):
    code, _, err = run("tokens", "make", "agent", "--budget", "2")
    assert (code, "for the scopes launch" in err) == (USAGE, True), err
    assert not AccessToken.objects.filter(name="agent").exists()


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": 4, "vocab_size": 1000, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_a_model_is_added_from_a_folder_a_file_standard_input_or_the_hub(
    run, logged_in, tmp_path, monkeypatch, own_hub
):
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    text = json.dumps(CONFIG)
    for name, content in (("model", text), ("gated", text), ("list", "[]")):
        write_files(own_hub.folder / "team" / name, {"config.json": content})
    own_hub.gated, own_hub.tokens = {"team/gated": "manual"}, {"hf_x"}
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    for arguments, stdin, name in (
        ([folder], "", "tiny-llama"),
        ([folder / "config.json", "--name", "other"], "", "other"),
        (["-", "--name", "piped"], text, "piped"),
        (["team/model"], "", "team/model"),
    ):
        code, out, err = run("models", "add", *arguments, stdin=stdin)
        assert code == DONE, err
        assert name in out
        assert TeamModel.objects.get(name=name).config == CONFIG
    assert {each.authorization for each in own_hub.log} == {"Bearer hf_x"}
    added = TeamModel.objects.get(name="team/model")
    expected = ("hub", "team/model", own_hub.commit("team/model"))
    assert (added.source, added.repository, added.revision) == expected
    ref = team_model_ref(added, None, None)
    assert (ref.repository, ref.revision) == expected[1:]
    with monkeypatch.context() as patch:  # the site has no network, this machine has
        patch.setattr(repositories, "_read", Mock(side_effect=UnreachableError("No route.")))
        patch.setattr(Slipway, "_sleep", Mock(side_effect=AssertionError("it waits")))
        code, out, err = run("models", "add", "hf.co/team/model", "--name", "from here")
        assert (code, "jobs load its weights by name" in out) == (DONE, True), err
    added = TeamModel.objects.get(name="from here")
    assert (added.source, added.revision, added.config) == ("hub", "", CONFIG)
    extra = [{"field": "repository", "message": "There is no such field; the nearest is “name”"}]
    for refused, name in (
        (RepositoryProblem("the team's token does not open it."), "of mine"),
        (InvalidProblem("invalid", "There is no such field.", errors=extra), "earlier release"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(library, "with_config", Mock(side_effect=refused))
            code, out, err = run("models", "add", "team/model", "--name", name)
            said = getattr(refused, "sentence", refused.detail)
            assert (code, "without weights" in out, said in err) == (DONE, True, True)
            assert TeamModel.objects.get(name=name).config == CONFIG
            assert run("models", "add", "team/none")[0] != DONE
    for arguments, code, words in (
        (["team/gated"], USAGE, "is gated"),
        (["team/none"], USAGE, "has no repository 'team/none'"),
        (["team/list"], USAGE, "is no JSON object"),
        (["nothing"], USAGE, "MODEL is 'nothing': it must be a folder with a config.json"),
        (["-"], USAGE, "--name is missing"),
    ):
        done = run("models", "add", *arguments, stdin=text)
        assert (done[0], words in done[2]) == (code, True), done
        assert "hf_x" not in done[2]
    (folder / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = run("models", "add", folder)
    assert (code, "hidden_size" in err) == (USAGE, True), err


def test_files_and_models_are_listed_renamed_and_deleted(
    run, logged_in, job_file, host, team, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    run("launch", "-f", job_file, "-d", "--yes")
    job, attempt = Job.objects.get(), Attempt.objects.get()
    Job.objects.update(state="stopped")
    Attempt.objects.update(checkpoint_bytes=3 * 2**30, output_bytes=2**30)
    for name in ("mine", "mine", "other"):
        TeamModel.objects.create(team=team, name=name, source="config", config={})
    made = TeamModel.objects.create(team=team, name="made", source="job", attempt_id=attempt.pk)
    for arguments in (("files", "night run"), ("hosts", "files", host.slug)):
        code, out, err = run(*arguments)
        assert (code, "3.0 GiB" in out, job.pk in out) == (DONE, True, True), err
    assert run("files", job.pk, "--delete", "logs", "-y")[0] == USAGE
    code, out, err = run("files", job.pk, "--delete", "checkpoint", "--yes")
    assert (code, "deletes checkpoint" in out) == (DONE, True), err
    code, out, _ = run("models", "team")
    assert (code, [each in out for each in ("made", "other", "Llama")]) == (
        DONE,
        [True, True, False],
    )
    code, out, err = run("models", "rename", "other", "third")
    assert (code, "third" in out) == (DONE, True), err
    code, _, err = run("models", "rename", "third", "made")
    assert (code, "Another model of the team is called made" in err) == (USAGE, True), err
    code, out, err = run("models", "delete", "made", "--files", "--yes")
    assert (code, out) == (DONE, f"Deleted made ({made.pk}).\n"), err
    assert json.loads(run("files", job.pk, "-o", "json")[1])["items"][0]["pending"] == "all"
    for name, words in (
        ("mine", "several have this name"),
        ("none", "the team has no such model"),
    ):
        code, _, err = run("models", "delete", name, "-y")
        assert (code, words in err) == (USAGE, True), err


def test_labels_and_the_address_of_a_host_are_changed_one_by_one(run, as_admin, host):
    Host.objects.update(facts={**host.facts, "addresses": ["10.0.0.5", "10.0.0.6"]})
    code, out, err = run("hosts", "label", host.slug, "rack=b", "gpu=4090")
    assert (code, out) == (DONE, "gpu=4090\nrack=b\n"), err
    code, out, _ = run("hosts", "label", host.slug, "rack-", "zone=1")
    assert (code, out) == (DONE, "gpu=4090\nzone=1\n")
    assert run("hosts", "label", host.slug)[1] == out
    assert Host.objects.get().labels == {"gpu": "4090", "zone": "1"}
    code, _, err = run("hosts", "label", host.slug, "rack-")
    assert (code, "has no label 'rack': it has gpu, zone" in err) == (USAGE, True)
    code, _, err = run("hosts", "label", host.slug, "rack")
    assert (code, "LABEL is 'rack': write it as KEY=VALUE" in err) == (USAGE, True)
    code, out, err = run("hosts", "address", host.slug, "10.0.0.6")
    assert (code, out) == (DONE, "10.0.0.5\n10.0.0.6 (chosen)\n"), err
    assert "10.0.0.6, gpu=4090, zone=1" in run("hosts", "get", host.slug)[1]
    code, _, err = run("hosts", "address", host.slug, "10.9.9.9")
    assert (code, "10.0.0.5, 10.0.0.6" in err) == (USAGE, True)


def test_devices_are_cordoned_by_number_or_all_and_uncordoned(run, as_admin, host):
    code, out, err = run("hosts", "cordon", host.slug, "0", "--reason", "ECC errors")
    assert (code, "cpu 0" in out) == (DONE, True), err
    assert host.devices.get().cordon_reason == "ECC errors"
    code, _, err = run("hosts", "cordon", host.slug, "--reason", "again")
    assert (code, "left to cordon" in err) == (DONE, True)
    code, out, _ = run("hosts", "uncordon", host.slug)
    assert (code, "takes jobs again" in out, host.devices.get().cordoned_at) == (DONE, True, None)
    code, _, err = run("hosts", "cordon", host.slug, "gpu7", "--reason", "x")
    assert (code, "names no device of Box: it has cpu0" in err) == (USAGE, True)
    assert run("hosts", "cordon", host.slug)[0] == USAGE


def test_an_environment_is_built_and_removed_by_its_name(run, as_admin, host):
    state = EnvironmentState(name="vllm", stage="absent").model_dump(mode="json")
    Host.objects.update(checks={**host.checks, "environments": [state]})
    for action, arguments in (("build", ()), ("remove", ("--yes",))):
        code, out, err = run("hosts", "environments", action, host.slug, "vllm", *arguments)
        assert (code, "at its next heartbeat" in out) == (DONE, True), err
        (order,) = orders_of(Host.objects.get())
        assert (order.name, order.action) == ("vllm", action)
        code, out, err = run("hosts", "environments", "list", host.slug)
        assert (code, out.split()[3:7]) == (DONE, ["vllm", "absent,", "to", action]), err
    code, _, err = run("hosts", "environments", "build", host.slug, "llama")
    assert (code, "has no environment llama" in err) == (FAILED, True)


def test_the_models_of_a_host_are_listed_pinned_deleted_and_kept_by_a_rule(run, as_admin, host):
    for name, is_complete in (("tiny", True), ("part", False)):
        HostModel.objects.create(
            host=host, repository=f"acme/{name}", commit="a" * 40, size_bytes=2**30, num_files=3,
            is_complete=is_complete,
        )  # fmt: skip
    tiny = HostModel.objects.get(repository="acme/tiny")
    for arguments, words in (
        ((), "acme/part  aaaaaaaaaaaa incomplete"),
        (("--pin", "acme/tiny"), "pinned by alice"),
        (("--unpin", "acme/tiny"), "acme/tiny"),
        (("--delete", "acme/tiny@aaaaaaa", "--yes"), "is being deleted"),
        (("--keep", "1.5"), "acme/tiny"),
    ):
        code, out, err = run("hosts", "models", host.slug, *arguments)
        assert (code, words in out) == (DONE, True), (arguments, out, err)
    found = Host.objects.get()
    assert (found.checks["model_orders"], found.keep_models_bytes) == (
        {tiny.key: "alice"},
        3 * 2**29,
    )
    assert run("hosts", "models", host.slug, "--keep", "all")[0] == DONE
    assert Host.objects.get().keep_models_bytes is None
    for wrong, words in (("-1", "--keep is '-1'"), ("much", "0 to 1,073,741,824 GiB, or all")):
        code, _, err = run("hosts", "models", host.slug, "--keep", wrong)
        assert (code, words in err) == (USAGE, True), err
    code, _, err = run("hosts", "models", host.slug, "--pin", "acme/none")
    assert (code, "it has acme/part and acme/tiny" in err) == (FAILED, True), err


def test_a_plan_on_a_host_or_pool_of_the_server_is_made_for_its_hardware(
    run, logged_in, host, other_host
):
    command = ("plan", "serve", "llama-3.2-1b", "--top", "1", "-o", "json", "--on")
    for name in (host.slug, host.name, host.pool.name):
        if name == host.pool.name:
            host_beat(host=other_host, beat=make_beat(microbench=make_microbench()))
        code, out, err = run(*command, name)
        assert code == DONE, err
        answer = json.loads(out)
        made = Plan.objects.order_by("saved_at").last()
        assert made.pk in err
        assert answer["request"]["cluster"]["device"]["kind"] == "cpu"
        assert answer["request"]["workload"]["input_tokens"] == 1024
        chosen = made.document.hardware
        is_pool = name == host.pool.name
        assert (chosen.pool, chosen.host) == ((host.pool_id, None) if is_pool else (None, host.pk))
        assert run("explain", answer["id"])[0] == DONE
    assert run("launch", made.pk, "-y", "-d")[0] == DONE
    for arguments, words in (
        (
            (*command, "no-such"),
            f"Nor has http://testserver a host or pool of this name; its hosts: {host.slug}",
        ),
        ((*command, host.slug, "--on", "h100"), "stands alone: give one --on"),
        ((*command, host.slug, "--set", "cluster.nodes=2"), "the server knows the hardware"),
    ):
        code, _, err = run(*arguments)
        assert (code, words in err) == (USAGE, True), err
    before = Plan.objects.count()
    assert run("plan", "serve", "llama-3.1-8b", "--on", "h100", "-o", "json")[0] == DONE
    assert Plan.objects.count() == before  # of the catalog: planned here
    run("logout")
    code, _, err = run(*command, host.slug)
    assert code == USAGE
    assert "nearest: " in err
    assert "If it is a host or a pool of a server, log in with `slipway login SERVER`" in err


def test_names_of_the_server_are_completed_in_time_and_silently(
    run, logged_in, job_file, host, monkeypatch, capsys, web
):
    assert run("launch", "-f", job_file, "-y", "-d")[0] == DONE
    assert run("launch", "-f", job_file, "-y", "-d", "--name", "plain-1")[0] == DONE
    assert run("launch", "-f", job_file, "-y", "-d", "--name", "$(reboot)")[0] == DONE
    web.replies = {
        f"/api/v1/{name}": (200, run(*arguments, "-o", "json")[1])
        for name, arguments in (
            ("jobs", ("ps", "-a")),
            ("hosts", ("hosts", "list")),
            ("plans", ("plans", "list")),
        )
    }
    jobs = set(Job.objects.values_list("pk", flat=True))
    plans = set(Plan.objects.values_list("pk", flat=True))
    monkeypatch.setattr("runners.client.transport.httpx.Client", CLIENT)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("SLIPWAY_SERVER", web.url)
    monkeypatch.setenv("SLIPWAY_TOKEN", "slp_x")
    monkeypatch.setenv("_SLIPWAY_COMPLETE", "complete_bash")

    def completed(words: str) -> set[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            cli.main([])
        out, err = capsys.readouterr()
        assert err == ""
        return set(out.split())

    assert COMPLETION_SECONDS <= 1.2  # with the start of the program less than two
    monkeypatch.setattr("runners.cli.server.COMPLETION_SECONDS", 30.0)  # a busy machine
    for words, found in (
        ("slipway get ", {*jobs, "plain-1"}),
        ("slipway logs plai", {"plain-1"}),
        ("slipway compare x plain", {"plain-1"}),
        ("slipway hosts drain ", {host.slug}),
        ("slipway launch x --on ", {host.slug}),
        (f"slipway plan serve x --on {host.slug[:2]}", {host.slug}),
        ("slipway plans get ", plans),
        ("slipway launch ", plans),
    ):
        assert completed(words) == found, words
    monkeypatch.setattr("runners.cli.server.COMPLETION_SECONDS", 0.3)
    web.is_silent = True
    began = time.monotonic()
    assert completed("slipway get ") == set()
    assert time.monotonic() - began < 10  # it would be silent for 20
    monkeypatch.setenv("SLIPWAY_SERVER", "http://127.0.0.1:9")  # nobody listens
    assert completed("slipway get ") == set()
    monkeypatch.delenv("SLIPWAY_TOKEN")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    assert completed("slipway get ") == set()  # nobody is logged in


# Operations without a command of their own: `slipway api` calls them.
BY_NAME_ALONE = {
    # The planner and its catalogs are on this machine: `plan`, `export`, `models`, `devices`.
    "ask_plan", "ask_estimate", "ask_inverse", "import_plan", "list_exports", "export_plan",
    "get_model", "list_devices", "list_techniques", "get_technique",
    # Steps of a plan that is edited on its pages; a file is changed and launched anew.
    "change_plan", "compute_plan", "clone_plan", "save_plan", "apply_suggestion",
    "list_plan_versions", "get_plan_limit",
    # Of agents, which call them by `slipway mcp`.
    "get_post_mortem", "search",
    # Of operators and admins, seldom: hosts that are alike, planned hosts, limits, calibration.
    "add_virtual_host", "mark_host_apart", "revoke_enrolment", "abandon_job", "change_limits",
    "get_limits", "list_audit", "list_members", "list_sessions", "list_measurements",
    "decide_measurement",
    # Copies on a host's page; the commands that begin them follow them to their end.
    "list_model_copies", "stop_model_copy",
    # Jobs that their pages start.
    "evaluate_model", "launch_classification",
    # Of browsers, for live pages.
    "get_ticket",
}  # fmt: skip


def test_every_operation_has_a_command_of_its_own_or_is_an_exception():
    called = set()
    for path in Path(cli.__file__).parent.glob("*.py"):
        if path.stem not in {"raw", "mcp"}:
            called |= set(re.findall(r"\bclient\.(\w+)\b", path.read_text()))
    known = {each.name for each in operations()}
    assert called & known == known - BY_NAME_ALONE
    assert known >= BY_NAME_ALONE


@pytest.mark.django_db(databases="__all__", transaction=True)
def test_a_plan_is_the_same_document_in_the_browser_as_yaml_launched_edited_and_asked_by_an_agent(
    run, logged_in, alice, team, host, tmp_path
):
    def document(plan: str) -> dict:
        return yaml.safe_load(run("plans", "yaml", plan)[1])

    browser = Walker(client_of(alice), "?preset=demo")
    browser.press("workload", sequence_length="64", global_batch_size="8", lr_warmup_steps="3")
    browser.press("hardware", **{"pin-micro_batch_size": "2"})
    form = {"go": "keep", "run": "job", "name": "night", "max_retries": "2"}
    browser.client.post(f"/plans/{browser.plan_id}/launch/", form)
    made = Plan.objects.get(name="night")
    original = document(made.pk)
    assert original["workload"]["sequence_length"] == 64
    assert original["pins"] == {"micro_batch_size": 2}

    path = tmp_path / "plan.yaml"
    path.write_text(run("plans", "yaml", made.pk)[1])
    code, _, err = run("launch", "-f", path, "-y", "-d")
    assert code == DONE, err
    job = Job.objects.get()
    assert document(job.plan_id) == original

    location = browser.client.get(f"/plans/{made.pk}/edit/goal/")["Location"]
    browser.plan_id = re.findall(r"/plans/(\w+)/", location)[0]
    browser.to_review()
    assert document(browser.plan_id) == original
    browser.press("workload", sequence_length="32")
    edited = document(browser.plan_id)
    assert edited["workload"] == {**original["workload"], "sequence_length": 32}
    assert {**edited, "workload": original["workload"]} == original

    assert agent(alice, team, "read")("document", plan_id=made.pk) == original


def test_the_command_line_launches_steps_and_sweeps_and_follows_them(
    run, logged_in, team, alice, host, tmp_path, monkeypatch
):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"name": "Small", "steps": CHAIN}))
    code, out, err = run("launch", "-f", path, "--dry-run")
    assert (code, "Small: possible" in out, Workflow.objects.count()) == (0, True, 0), err
    code, out, err = run("launch", "-f", path, "--yes", "-d")
    workflow = Workflow.objects.get()
    assert (code, out.split()[-1]) == (0, workflow.pk), err
    assert "Small" in run("workflows", "list")[1]
    monkeypatch.setattr("time.sleep", lambda _seconds: end(workflow, reason="exit_nonzero"))
    code, _, err = run("workflows", "follow", workflow.pk)
    assert (code, f"slipway workflows resume {workflow.pk}" in err) == (1, True), err
    assert run("workflows", "resume", workflow.pk)[0] == 0
    assert run("workflows", "stop", workflow.pk, "--yes")[0] == 0
    assert run("workflows", "delete", workflow.pk, "--yes")[0] == 0
    path.write_text(yaml.safe_dump(PRETRAIN))
    sweep = ("--sweep", "workload.learning_rate=1e-4,3e-4")
    code, out, err = run("launch", "-f", path, "-d", "-o", "json", "--yes", *sweep)
    tried = [each["settings"] for each in json.loads(out)["workflow"]["steps"]]
    assert tried == [{"workload.learning_rate": 1e-4}, {"workload.learning_rate": 3e-4}], err
    for wrong in ("workload.learning_rate", "nothing=1", "workload.no=1"):
        code, _, err = run("launch", "-f", path, "--yes", "--sweep", wrong)
        assert code != 0, err


def test_the_command_line_tunes_a_plan_and_follows_its_trials(
    run, logged_in, team, alice, host, monkeypatch
):
    plan = test_tunings.planned(team, alice, test_tunings.TRAINING)
    code, out, err = run("tune", plan.pk, "--trials", 4, "--dry-run")
    assert (code, "compiled layers" in out, Tuning.objects.count()) == (0, True, 0), err
    code, out, err = run("tune", plan.pk, "--trials", 4, "--seconds", 600, "--yes", "-d")
    tuning = Tuning.objects.get()
    assert (code, out.split()[-1], tuning.options["max_seconds"]) == (0, tuning.pk, 600.0), err
    assert tuning.pk in run("tunings", "list")[1]
    monkeypatch.setattr("time.sleep", lambda _seconds: test_tunings.end(tuning))
    code, out, err = run("tunings", "follow", tuning.pk)
    assert (code, "Best: compiled layers" in out, "0 As planned: behind" in err) == (0, True, True)
    assert "(chosen)" in run("tunings", "get", tuning.pk)[1]
    code, _, err = run("tunings", "stop", tuning.pk, "--yes")
    assert (code, "has ended" in err) == (1, True)
    assert run("tunings", "delete", tuning.pk, "--yes")[0] == 0
    monkeypatch.setattr("time.sleep", lambda _seconds: test_tunings.end(Tuning.objects.get()))
    code, out, err = run("tune", plan.pk, "--trials", 2, "--yes", "-o", "json")
    assert (code, json.loads(out)["state"], err) == (0, "succeeded", "")
    code, _, err = run("tune", plan.pk, "--figure", "ttft_seconds", "--yes")
    assert (code, "Choose one of tokens_per_second" in err) != (0, False), err
