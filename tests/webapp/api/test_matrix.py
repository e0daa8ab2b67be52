"""Every operation against every role and scope, and the operation of every action on a page.

Both lists are read from the code: one without a rule here fails.
"""

import copy
import itertools
import json

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from runners.jobspec import TrainSpec
from tests.plugins.extent import sample
from tests.webapp.accounts.test_matrix import (
    ADMIN,
    LET_IN,
    LOGIN,
    MEMBER,
    NOT_THERE,
    OPERATOR,
    OWNER,
    PRACTITIONER,
    REFUSED,
    SELF,
    WORDS,
    Rule,
    expected,
)
from tests.webapp.api.operations import Operation, operations
from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, Scope
from webapp.accounts.tokens import includes, token_make
from webapp.jobs.services import job_create

pytestmark = pytest.mark.django_db(databases="__all__")


def rule(needs: int, *, is_object: bool = False) -> Rule:
    return Rule("", needs, is_object)


LIST, OBJECT = rule(MEMBER), rule(MEMBER, is_object=True)
ACT, OWN = rule(PRACTITIONER, is_object=True), rule(OWNER, is_object=True)
NEW, OPERATE = rule(PRACTITIONER), rule(OPERATOR, is_object=True)
SETUP = rule(OPERATOR)
RULES = {
    **dict.fromkeys(
        [
            "list_plans",
            "list_jobs",
            "list_hosts",
            "list_pools",
            "list_models",
            "list_data",
            "list_trusted_code",
            "list_devices",
            "list_techniques",
            "get_technique",
            "get_plan_schema",
            "search",
            "get_me",
            "list_members",
            "list_tokens",
            "list_launch_requests",
            "list_workflows",
            "list_tunings",
            "list_deployments",
            "list_servers",
            "list_observed_jobs",
            "list_serving_keys",
            "list_usage",
            "list_sessions",
            "get_limits",
            "get_ticket",
            "ask_plan",
            "ask_estimate",
            "ask_inverse",
        ],
        LIST,
    ),
    **dict.fromkeys(
        [
            "get_plan",
            "list_plan_versions",
            "list_exports",
            "export_plan",
            "get_plan_limit",
            "get_job",
            "get_job_log",
            "get_job_series",
            "get_job_figures",
            "list_job_events",
            "list_artefacts",
            "download_artefact",
            "follow_job",
            "get_post_mortem",
            "get_launch_request",
            "get_workflow",
            "get_tuning",
            "get_deployment",
            "get_deployment_draft",
            "get_server",
            "get_observed_job",
            "get_host",
            "get_queue",
            "get_model",
            "get_data",
            "compare_jobs",
            "list_measurements",
            "list_job_files",
            "list_host_files",
            "list_host_models",
            "list_model_copies",
            "get_model_copy",
        ],
        OBJECT,
    ),
    **dict.fromkeys(
        [
            "change_plan",
            "compute_plan",
            "apply_suggestion",
            "clone_plan",
            "save_plan",
            "request_launch",
            "delete_plan",
            "launch_plan",
            "start_tuning",
            "run_job_again",
            "resume_job",
            "plan_from_job",
            "evaluate_model",
            "publish_model",
            "delete_data",
            "change_model",
            "delete_model",
            "wake_deployment",
        ],
        ACT,
    ),
    **dict.fromkeys(
        [
            "stop_job",
            "abandon_job",
            "delete_job",
            "delete_job_files",
            "stop_workflow",
            "resume_workflow",
            "delete_workflow",
            "stop_tuning",
            "delete_tuning",
            "change_deployment",
            "keep_deployment_draft",
            "roll_out_deployment_draft",
            "discard_deployment_draft",
            "sleep_deployment",
            "delete_deployment",
            "revoke_serving_key",
        ],
        OWN,
    ),
    **dict.fromkeys(
        [
            "create_plan",
            "create_plan_from_request",
            "import_plan",
            "launch_document",
            "start_workflow",
            "create_deployment",
            "make_serving_key",
            "request_launch_of_document",
            "add_model",
            "add_data",
            "launch_classification",
        ],
        NEW,
    ),
    "list_secrets": rule(PRACTITIONER),
    **dict.fromkeys(
        [
            "act_on_host",
            "change_host",
            "mark_host_apart",
            "validate_host",
            "cordon_device",
            "uncordon_device",
            "build_environment",
            "remove_environment",
            "pin_host_model",
            "delete_host_model",
            "set_models_rule",
            "copy_model",
            "stop_model_copy",
            "send_model_part",
            "reorder_queue",
            "change_server",
            "remove_server",
            "remove_observed_job",
            "decide_measurement",
            "get_enrolment",
            "revoke_enrolment",
        ],
        OPERATE,
    ),
    **dict.fromkeys(
        [
            "add_host",
            "add_server",
            "observe_job",
            "add_virtual_host",
            "set_secret",
            "change_limits",
        ],
        SETUP,
    ),
    "delete_secret": OPERATE,
    "make_token": rule(PRACTITIONER),
    "revoke_token": rule(SELF, is_object=True),
    "rotate_serving_key": rule(SELF, is_object=True),
    "withdraw_launch_request": rule(SELF, is_object=True),
    "list_audit": rule(ADMIN),
    "allow_code": rule(ADMIN),
    "forbid_code": rule(ADMIN, is_object=True),
}
BODIES: dict[str, dict] = {
    "create_plan": {"goal": "serve"},
    "create_plan_from_request": {"request": {"workload": {"kind": "serve"}}},
    "change_plan": {"objective": "latency"},
    "save_plan": {},
    "request_launch": {},
    "withdraw_launch_request": {},
    "launch_document": {"goal": "serve", "model": "demo"},
    "start_workflow": {"steps": [{"goal": "pretrain", "model": "demo"}]},
    "start_tuning": {},
    "create_deployment": {"name": "small", "document": {"goal": "serve", "model": "demo"}},
    "change_deployment": {"is_paused": True},
    "keep_deployment_draft": {"is_paused": True},
    "roll_out_deployment_draft": {},
    "make_serving_key": {"name": "laptop"},
    "rotate_serving_key": {"overlap_hours": 1},
    "request_launch_of_document": {"document": {"goal": "serve", "model": "demo"}},
    "import_plan": {"text": "vllm serve meta-llama/Llama-3.1-8B"},
    "launch_plan": {},
    "pin_host_model": {"model": "acme/tiny"},
    "set_models_rule": {"keep_gib": 5},
    "copy_model": {
        "model": f"acme/tiny@{'a' * 40}",
        "files": [{"path": "config.json", "size_bytes": 2, "etag": "b" * 40}],
    },
    "plan_from_job": {},
    "abandon_job": {"host_name": "box"},
    "launch_classification": {"host": "none"},
    "add_model": {"name": "x", "config": {}},
    "evaluate_model": {},
    "publish_model": {"repository": "lab/tuned"},
    "change_model": {"name": "y"},
    "add_host": {"name": "next"},
    "add_server": {"address": "http://10.0.0.6:8000"},
    "change_server": {"name": "Renamed"},
    "observe_job": {"host": "box", "job_id": "17"},
    "add_virtual_host": {"name": "next", "device": "h100-sxm"},
    "change_host": {"labels": {"rack": "1"}},
    "mark_host_apart": {"other": "none"},
    "cordon_device": {"reason": "a fan is loud"},
    "reorder_queue": {"priority": "low"},
    "decide_measurement": {"decision": "excluded", "reason": "a backup ran"},
    "make_token": {"name": "laptop", "scope": "launch"},
    "set_secret": {"value": "hf_abcdefgh"},
    "change_limits": {"max_devices": 3},
    "allow_code": {"model": f"acme/own@{'b' * 40}"},
    "ask_plan": {}, "ask_estimate": {}, "ask_inverse": {},
}  # fmt: skip
QUERY = {
    "get_job_series": "?metrics=loss",
    "get_ticket": "?topics=jobs",
    "delete_job_files": "?part=all",
    "delete_host_model": "?model=acme/tiny",
    "send_model_part": "?offset=0",
    "search": "?q=demo",
    "compare_jobs": "?job={job_id}&job={other_job}",
}


@pytest.fixture
def arguments(things, job, second) -> dict[str, str]:
    """The values of the operations' path arguments."""
    named = {name.strip("<>").rpartition(":")[2]: value for name, value in things.items()}
    return named | {
        "other_job": second.pk,
        "number": "0",
        "action": "recheck",
        "name": "model",
        "key": "lora",
        "access_token": things["<access_id>"],
        "model_id": things["<slug:model_id>"],
    }


def send(client: Client, each: Operation, arguments: dict[str, str]):
    values = dict(arguments)
    if each.path.startswith("/tokens"):
        values["token_id"] = values["access_token"]
    elif each.path.startswith("/secrets"):
        values["name"] = "HF_TOKEN"
    elif "environments" in each.path:
        values["name"] = "llamacpp"
    elif "exports" in each.path:
        values["key"] = "torchrun"
    path = (each.path + QUERY.get(each.name, "")).replace("{path:", "{").format(**values)
    if each.name == "add_data":
        return client.post(f"/api/v1{path}", {"file": SimpleUploadedFile("a.txt", b"words")})
    body = BODIES.get(each.name)
    kind = "application/json" if body is not None else "application/octet-stream"
    data = json.dumps(body) if body is not None else ""
    return client.generic(each.method, f"/api/v1{path}", data, content_type=kind)


def outcome(client: Client, each: Operation, arguments: dict[str, str]) -> tuple[str, str]:
    """Return how an operation received someone, and its code; what it changed is rolled back."""
    with transaction.atomic():
        answer = send(client, each, arguments)
        transaction.set_rollback(True)
    assert answer.status_code not in {405, 500}, f"{each.name} answered {answer.status_code}"
    is_problem = answer.headers.get("Content-Type", "").startswith("application/problem")
    code = answer.json()["code"] if is_problem else ""
    return WORDS.get(answer.status_code, LET_IN), code


@pytest.fixture
def second(team, alice, host):
    """Another job of alice's, to compare with."""
    return job_create(
        team=team, owner=alice, host=host, spec=TrainSpec(), name="other", model_name=""
    )


def test_every_operation_has_a_rule_and_a_name_of_its_own():
    found = [each.name for each in operations()]
    assert sorted(found) == sorted(RULES)


# Where the thing itself is missing before anyone is judged, a stranger is told so, too.
GONE = {
    "launch_classification", "apply_suggestion", "mark_host_apart", "delete_secret",
    "build_environment", "remove_environment", "pin_host_model", "delete_host_model",
    "forbid_code",
}  # fmt: skip


def test_every_operation_receives_each_person_as_its_rule_says(people, arguments):
    cookies = {who: copy.deepcopy(client.cookies) for who, client in people.items()}
    wrong = {}
    pairs = list(itertools.product(operations(), people.items()))
    for each, (who, client) in sample(pairs, share=0.4, kind=lambda pair: pair[0].name):
        client.cookies = copy.deepcopy(cookies[who])
        got, code = outcome(client, each, arguments)
        wanted = expected(RULES[each.name])[who]
        if each.name in GONE and got == NOT_THERE and wanted in {LET_IN, NOT_THERE}:
            continue
        if got != wanted:
            wrong[each.name, who] = (got, wanted, code)
    assert not wrong, wrong


# With any scope a token may be sent to revoke itself; for another one it needs this.
OF_OTHERS = {"revoke_token": Scope.ADMIN}


def test_each_token_does_what_its_scope_includes(olga, team, arguments):
    Membership.objects.filter(user=olga).update(role="admin")
    tokens = {
        scope: Client(
            headers={
                "Authorization": "Bearer "
                + token_make(team=team, by=olga, name="t", scope=scope)[1]
            }
        )
        for scope in Scope
    }
    wrong = {}
    pairs = list(itertools.product(operations(), tokens.items()))
    for each, (scope, client) in sample(pairs, share=0.4, kind=lambda pair: pair[0].name):
        got, code = outcome(client, each, arguments)
        is_let_in = (got, code) not in {(REFUSED, "scope_too_low"), (LOGIN, "")}
        if is_let_in != includes(scope, OF_OTHERS.get(each.name, each.scope)) or got == LOGIN:
            wrong[each.name, scope] = (got, code)
    assert not wrong, wrong


def test_a_write_by_a_session_needs_the_csrf_token(alice):
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice)
    answer = client.post("/api/v1/plans", json.dumps({"goal": "serve"}), "application/json")
    assert answer.status_code == 403


def test_a_write_without_a_credential_is_told_to_show_one():
    client = Client(enforce_csrf_checks=True)
    answer = client.post("/api/v1/plans", json.dumps({"goal": "serve"}), "application/json")
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")


# The operation that does what an address of the pages does; a sentence where there is none.

BROWSER = "-only in a browser: cookies, passwords and forms"
TWINS = {
    "login": BROWSER, "logout": BROWSER, "team-choose": "-a token is of one team",
    "theme": BROWSER, "password": BROWSER, "password-forgotten": BROWSER,
    "password-new": BROWSER, "session-end": "-asks for the password",
    "sessions": "list_sessions", "tokens": "list_tokens", "token-save": "make_token",
    "token-remove": "revoke_token", "secrets": "list_secrets", "secret-save": "set_secret",
    "secret-remove": "delete_secret", "audit": "list_audit", "audit-export": "list_audit",
    "home": "list_jobs", "search": "search",
    "workflow-list": "list_workflows", "workflow-detail": "get_workflow",
    "workflow-stop": "stop_workflow", "workflow-resume": "resume_workflow",
    "workflow-delete": "delete_workflow",
    "plan-tune": "start_tuning", "tuning-list": "list_tunings", "tuning-detail": "get_tuning",
    "tuning-stop": "stop_tuning", "tuning-delete": "delete_tuning",
    "deployment-list": "list_deployments", "deployment-detail": "get_deployment",
    "deployment-playground": "-the gateway's own API answers",
    "deployment-playground-key": "-a key of one's own is made instead",
    "deployment-wake": "wake_deployment", "deployment-sleep": "sleep_deployment",
    "deployment-draft-start": "roll_out_deployment_draft",
    "deployment-draft-discard": "discard_deployment_draft",
    "deployment-change": "change_deployment", "deployment-delete": "delete_deployment",
    "server-list": "list_servers", "server-detail": "get_server", "server-save": "add_server",
    "server-change": "change_server", "server-remove": "remove_server",
    "host-observe": "observe_job", "observed-job": "get_observed_job",
    "observed-job-remove": "remove_observed_job",
    "serving-keys": "list_serving_keys", "serving-key-save": "make_serving_key",
    "serving-key-revoke": "revoke_serving_key",
    "serving-key-rotate": "rotate_serving_key",
    "serving-usage": "list_usage",
    "serving-usage-file": "list_usage",
    "plan-paste": "import_plan", "plan-by-name": "create_plan", "approvals": "list_launch_requests",
    "approve": "-a person decides, in a browser", "deny": "-a person decides, in a browser",
    "withdraw": "withdraw_launch_request",
    "plan-new": "create_plan", "template-launch": "launch_classification",
    "plan-step": "change_plan", "plan-upload": "add_data", "plan-offers": "get_plan",
    "plan-verdict": "get_plan", "plan-suggestion": "apply_suggestion",
    "plan-list": "list_plans", "plan-detail": "get_plan", "plan-launch": "launch_plan",
    "plan-clone": "clone_plan", "plan-delete": "delete_plan", "plan-compute": "compute_plan",
    "plan-export": "export_plan", "plan-tab": "list_plan_versions", "limits": "ask_inverse",
    "model-choices": "list_models", "device-choices": "list_devices",
    "remote-code": "list_trusted_code", "remote-code-save": "allow_code",
    "remote-code-remove": "forbid_code", "model-list": "list_models", "model-new": "add_model", "model-evaluate": "evaluate_model",
    "model-publish": "publish_model",
    "model-rename": "change_model", "model-delete": "delete_model",
    "model-detail": "get_model", "technique-list": "list_techniques",
    "technique-detail": "get_technique", "dataset-list": "list_data",
    "dataset-upload": "add_data", "dataset-remove": "delete_data",
    "job-list": "list_jobs", "job-detail": "get_job", "job-metrics": "get_job_series",
    "job-logs": "get_job_log", "job-log": "get_job_log", "job-events": "list_job_events",
    "job-config": "get_job", "job-artefacts": "list_artefacts",
    "job-download": "download_artefact", "job-figures": "get_job_figures",
    "job-playground": "-the endpoint's own API answers", "job-playground-answer":
    "-the endpoint's own API answers", "job-postmortem": "get_post_mortem",
    "job-changes": "get_post_mortem", "job-replan": "plan_from_job",
    "job-abandon": "abandon_job", "job-stop": "stop_job", "job-clone": "plan_from_job",
    "job-rerun": "run_job_again", "job-resume": "resume_job", "measurement-decide": "decide_measurement",
    "job-delete": "delete_job", "job-files-delete": "delete_job_files", "proof-report": "download_artefact", "compare": "compare_jobs",
    "queue-list": "list_pools", "queue-limits": "change_limits", "queue-detail": "get_queue",
    "queue-up": "reorder_queue", "queue-down": "reorder_queue",
    "queue-priority": "reorder_queue", "host-list": "list_hosts", "host-add": "add_host",
    "host-check": "get_enrolment", "token-revoke": "revoke_enrolment",
    "host-virtual": "add_virtual_host", "host-detail": "get_host",
    **dict.fromkeys(
        ("host-drain", "host-undrain", "host-recheck", "host-rotation", "host-revoke",
         "host-maintenance", "host-retire"), "act_on_host"),
    "host-prove": "validate_host", "host-address": "change_host", "host-labels": "change_host",
    "host-apart": "mark_host_apart", "device-cordon": "cordon_device",
    "device-uncordon": "uncordon_device", "environment-build": "build_environment",
    "environment-remove": "remove_environment", "host-model-pin": "pin_host_model",
    "host-model-unpin": "pin_host_model", "host-model-remove": "delete_host_model",
    "host-models-rule": "set_models_rule", "host-copy-begin": "copy_model",
    "host-copy-stop": "stop_model_copy",
    "docs": "-read in a browser", "docs-index": "-read in a browser",
    "healthz": "-of the process", "readyz": "-of the process",
}  # fmt: skip


def test_every_address_of_a_page_has_its_operation():
    names = set()
    for pattern in get_resolver().url_patterns:
        if isinstance(pattern, URLPattern):
            names.add(pattern.name)
        elif isinstance(pattern, URLResolver) and pattern.app_name != "admin":
            names |= {each.name for each in pattern.url_patterns if isinstance(each, URLPattern)}
    assert names == set(TWINS)
    known = {each.name for each in operations()}
    assert {twin for twin in TWINS.values() if not twin.startswith("-")} <= known


def test_who_calls_is_told_with_scope_and_team(alice, team):
    _, text = token_make(team=team, by=alice, name="t", scope="plan")
    answer = Client(headers={"Authorization": f"Bearer {text}"}).get("/api/v1/me").json()
    assert (answer["user"], answer["scope"]) == ("alice", "plan")
    assert answer["team"] == {"id": team.pk, "name": team.name, "role": "practitioner"}
    assert client_of(alice).get("/api/v1/me").json()["scope"] == "admin"
