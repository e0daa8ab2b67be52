"""What the OpenAPI document says beyond ninja's: summaries, headers, examples, media types."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from webapp.api.descriptions import describe
from webapp.api.requests import (
    FORM_TYPE,
    KEY_HEADER,
    LONGEST_KEY,
    RATE_LIMIT,
    RATE_REMAINING,
    RATE_RESET,
    REPLAYED,
    WRITES,
)
from webapp.core.problems import JSON_TYPE, REQUEST_ID, name_media_types

Document = dict[str, Any]
JOB_SPEC = "JobSpec"  # what a job runs, by its kind
# What a 201 made, by the operations whose reply has an address of its own.
LOCATIONS = {
    **dict.fromkeys(("create_plan", "create_plan_from_request", "clone_plan", "plan_from_job"),
                    "plans/{id}"),
    "import_plan": "plans/{plan[id]}",
    "launch_plan": "jobs/{job[id]}",
    "request_launch": "launch-requests/{id}",
    **dict.fromkeys(("run_job_again", "validate_host", "evaluate_model", "publish_model"),
                    "jobs/{id}"),
    "add_model": "models/{id}",
    "add_data": "data/{id}",
    "create_deployment": "deployments/{id}",
    "add_server": "servers/{id}",
    "observe_job": "observed-jobs/{id}",
    "add_host": "hosts/enrolments/{id}",
    "add_virtual_host": "hosts/{slug}",
    "copy_model": "hosts/{host}/copies/{id}",
}  # fmt: skip
PATH_ARGUMENTS = {
    "action": "What is done with the host",
    "attempt_id": "Id of the attempt",
    "commit": "Commit of the repository, 40 hex digits",
    "code_id": "Id of the permission to run a repository's code",
    "copy_id": "Id of the copy of a model",
    "dataset_id": "Id of the uploaded file",
    "deployment_id": "Id of the deployment",
    "device_id": "Id of the host's device",
    "job_id": "Id of the job",
    "key_id": "Id of the key",
    "key": "Key of the format or of the technique",
    "measurement_id": "Id of the measurement",
    "model_id": "Id of a model of the team, or any name of one of the catalog",
    "name": "Name of the secret, environment, artefact or repository",
    "number": "Of the suggestion or file, from 0",
    "observed_id": "Id of the observed job",
    "org": "Owner of the repository",
    "path": "Path of the file in its artefact or model",
    "plan_id": "Id of one version of the plan, or of a draft",
    "pool_id": "Id or slug of the pool",
    "question": "Which limit",
    "request_id": "Id of the request for a launch",
    "server_id": "Id of the observed server",
    "slug": "Slug of the host",
    "token_id": "Id of the token",
    "workflow_id": "Id of the workflow",
    "tuning_id": "Id of the tuning",
}
RETRIED = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
HEADERS = {
    REQUEST_ID: {
        "description": "Id of the request, also in what the site logs of it",
        "schema": {"type": "string"},
    },
    REPLAYED: {
        "description": f"“true” if the reply is a repeated one, of an earlier {KEY_HEADER}",
        "schema": {"type": "string", "const": "true"},
    },
    "WWW-Authenticate": {
        "description": "The scheme of access tokens and of hosts' credentials",
        "schema": {"type": "string", "const": "Bearer"},
    },
    "Location": {
        "description": "Address of what was made",
        "schema": {"type": "string", "format": "uri-reference"},
    },
    RATE_LIMIT: {
        "description": "Calls at once that a person may make",
        "schema": {"type": "integer", "minimum": 1},
    },
    RATE_REMAINING: {
        "description": "Calls that are left at once",
        "schema": {"type": "integer", "minimum": 0},
    },
    RATE_RESET: {
        "description": "Seconds until all of them are left again",
        "schema": {"type": "integer", "minimum": 0},
    },
    "Retry-After": {
        "description": "Seconds until the request may be repeated",
        "schema": {"type": "integer", "minimum": 0},
    },
}
KEY_PARAMETER = {
    "name": KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "A text of the caller's, such as a UUID: a repetition within 24 hours gets the "
    "first reply, and nothing happens twice",
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[ -~]+$"},
}
# Bodies by operation; a test checks them against the operations' own types.
EXAMPLES: dict[str, dict[str, Any]] = {
    "create_plan": {
        "goal": "serve",
        "model": "meta-llama/Llama-3.1-8B",
        "workload": {"input_tokens": 1024, "output_tokens": 256, "concurrency": 16},
        "hardware": {"host": "this-machine"},
        "pins": {"weight_dtype": "fp8"},
    },
    "launch_plan": {"run": "endpoint", "engine": "vllm", "max_duration_seconds": 28800},
}


def complete(document: Document) -> None:
    """Add to ninja's OpenAPI document, in place, what holds for its operations alike."""
    name_media_types(document)
    document["servers"] = [{"url": "/", "description": "This site"}]
    components = document["components"]
    components["parameters"] = {KEY_HEADER: KEY_PARAMETER}
    components["headers"] = HEADERS
    _unname_schemes(components["securitySchemes"])
    _name_job_specs(components["schemas"])
    describe(components["schemas"])
    for method, operation in _operations(document):
        operation["summary"] = summary_of(operation["operationId"])
        for each in operation["parameters"]:
            _complete_parameter(each)
        if method in WRITES:
            key = {"$ref": f"#/components/parameters/{KEY_HEADER}"}
            operation["parameters"] = [*operation["parameters"], key]
        if {JSON_TYPE, FORM_TYPE} & operation.get("requestBody", {}).get("content", {}).keys():
            refusal = operation["responses"][HTTPStatus.CONFLICT]
            operation["responses"][415] = {**refusal, "description": "Unsupported Media Type"}
        for status, response in operation["responses"].items():
            is_replayed = method in WRITES and int(status) < HTTPStatus.BAD_REQUEST
            names = [REQUEST_ID, *[REPLAYED] * is_replayed, *["Retry-After"] * (status in RETRIED)]
            names += ["WWW-Authenticate"] * (status == HTTPStatus.UNAUTHORIZED)
            is_made = int(status) == HTTPStatus.CREATED and operation["operationId"] in LOCATIONS
            names += ["Location"] * is_made
            if int(status) < HTTPStatus.BAD_REQUEST and _is_for_people(operation):
                names += [RATE_LIMIT, RATE_REMAINING, RATE_RESET]
            refs = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
            response["headers"] = refs
        if example := EXAMPLES.get(operation["operationId"]):
            operation["requestBody"]["content"][JSON_TYPE]["example"] = example


def _unname_schemes(schemes: dict[str, Any]) -> None:
    """Take the name from schemes that are no ``apiKey``, which alone has one; ninja names all."""
    for scheme in schemes.values():
        if scheme["type"] != "apiKey":
            scheme.pop("name", None)


def _complete_parameter(parameter: dict[str, Any]) -> None:
    """Describe a path's parameter; put examples where they are a list, into the schema."""
    if parameter["in"] == "path":
        parameter["description"] = PATH_ARGUMENTS[parameter["name"]]
    if examples := parameter.pop("examples", None):
        parameter["schema"]["examples"] = examples


def _is_for_people(operation: dict[str, Any]) -> bool:
    return {"TokenAuth": []} in operation.get("security", ())


def summary_of(operation_id: str) -> str:
    """Return an operation's id as words: “List jobs” of ``list_jobs``."""
    return operation_id.replace("_", " ").capitalize()


def _name_job_specs(schemas: dict[str, Any]) -> None:
    """Give the specs of jobs a name, as hosts get them, and let replies refer to it."""
    schemas[JOB_SPEC] = {**schemas["RunRequest"]["properties"]["spec"], "title": JOB_SPEC}
    reference = {"$ref": f"#/components/schemas/{JOB_SPEC}"}
    schemas["JobDetail"]["properties"]["spec"] = reference


def _operations(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in document["paths"].values():
        for method, operation in path.items():
            yield method.upper(), operation
