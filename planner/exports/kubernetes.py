"""Export a plan as Kubernetes objects or as a Docker Compose file."""

import math
import re

from planner.cost.parameters import count_parameters
from planner.cost.weights import element_bytes
from planner.exports.export import (
    BALANCER,
    PORT,
    SERVING_PORT,
    ExportCase,
    Format,
    Notes,
    servers_per_node,
)
from planner.exports.launch import (
    OPEN_TAG,
    image_of,
    is_training,
    launch_arguments,
    launch_environment,
    launch_files,
    launch_notes,
    launch_script,
    separate_servers,
    vendor_of,
)
from planner.exports.yaml_text import yaml_text
from planner.specs.base import JsonObject
from planner.specs.units import GIB

# Export a plan on one node as a Docker Compose file.


FALLBACK_IMAGE = "IMAGE"
WORKDIR = "/workspace"
CACHE = "/huggingface"


def compose_document(case: ExportCase) -> JsonObject:
    """Return the file's content: one service with its devices and files."""
    service: JsonObject = {
        "image": image_of(case) or FALLBACK_IMAGE,
        "working_dir": WORKDIR,
        "entrypoint": [],
        "command": _compose_command(case),
        "ipc": "host",
        "volumes": [f"./:{WORKDIR}", f"huggingface:{CACHE}"],
        **_devices(case),
    }
    # For any user of the image, the model cache is on the volume.
    environment = {"HF_HOME": CACHE, **launch_environment(case)}
    service["environment"] = environment
    if case.nodes > 1:
        # Compose substitutes these from the environment of its caller.
        rendezvous = {name: f"${{{name}}}" for name in ("MASTER_ADDR", "NODE_RANK")}
        service |= {"environment": {**rendezvous, **environment}, "network_mode": "host"}
    elif not is_training(case):
        last = SERVING_PORT + servers_per_node(case, separate_servers(case)) - 1
        ports = str(SERVING_PORT) if last == SERVING_PORT else f"{SERVING_PORT}-{last}"
        service["ports"] = [f"{ports}:{ports}"]
    document: JsonObject = {"services": {case.workload.kind: service}}
    files = launch_files(case)
    if files:
        service["configs"] = [
            {"source": _config_name(name), "target": f"{WORKDIR}/{name}"} for name in files
        ]
        document["configs"] = {
            _config_name(name): {"content": text} for name, text in files.items()
        }
    return {**document, "volumes": {"huggingface": {}}}


def _compose_command(case: ExportCase) -> list[str]:
    script = launch_script(case, contained=True)
    # "$$" leaves the dollar to the container's shell instead of Compose.
    if script:
        return ["bash", "-c", script.replace("$", "$$")]
    return launch_arguments(case, contained=True)


def _config_name(file_name: str) -> str:
    return file_name.rsplit(".", 1)[0]


def _devices(case: ExportCase) -> JsonObject:
    vendor = vendor_of(case)
    if vendor == "nvidia":
        reserved = {"driver": "nvidia", "count": case.devices_per_node, "capabilities": ["gpu"]}
        return {"deploy": {"resources": {"reservations": {"devices": [reserved]}}}}
    if vendor == "amd":
        return {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"]}
    return {"devices": ["/dev/dri"]} if vendor == "intel" else {}


def _image_notes(case: ExportCase) -> list[str]:
    image = image_of(case)
    notes = []
    if image is not None and image.endswith(f":{OPEN_TAG}"):
        notes.append(f"put the tag of the release that you measure for {OPEN_TAG}")
    elif image is not None:
        notes.append(f"the options are those of {image.rpartition(':')[2]}, the image's tag")
    if image is None:
        notes.append(f"no public image for {case.device.vendor}: put your own for IMAGE")
    return notes


def compose_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the export leaves to the user."""
    notes = _image_notes(case)
    if case.nodes > 1:
        notes.append("start it on every node with MASTER_ADDR and NODE_RANK set")
    return (*notes, *launch_notes(case))


def compose_text(case: ExportCase) -> str:
    """Return the file as YAML."""
    return yaml_text(compose_document(case))


COMPOSE = Format("compose", "Docker Compose", "compose.yaml", compose_text, compose_notes)


RESOURCES = {
    "nvidia": "nvidia.com/gpu",
    "amd": "amd.com/gpu",
    "intel": "gpu.intel.com/xe",
    "google": "google.com/tpu",
}
MAX_NAME = 52
TEXT, OUTPUT = "/data/data.txt", "/output"
# The label of a pod's index, by kind of object.
INDEX_LABELS = {
    "StatefulSet": "apps.kubernetes.io/pod-index",
    "Job": "batch.kubernetes.io/job-completion-index",
}


def object_name(case: ExportCase) -> str:
    """Return the name of the objects: the model's name in DNS characters."""
    name = case.model.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:MAX_NAME].rstrip("-") or "plan"


# The token of gated models; a pod starts without the secret too.
HF_TOKEN: JsonObject = {
    "name": "HF_TOKEN",
    "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token", "optional": True}},
}
GIB_STEP = 10
FILES_RATIO = 1.2  # of the weights: tokenizer, configuration, and what a download leaves


def _claim(case: ExportCase) -> str:
    return f"{object_name(case)}-models"


def _models(case: ExportCase) -> JsonObject:
    """Return the claim of a volume that holds the downloaded checkpoint, for all pods."""
    weights = count_parameters(case.shape).total * element_bytes(case.shape.weight_dtype or "bf16")
    size = math.ceil(weights * FILES_RATIO / GIB / GIB_STEP) * GIB_STEP
    pods = case.nodes if is_training(case) or _spans_nodes(case) else separate_servers(case)
    spec = {
        "accessModes": ["ReadWriteMany" if pods > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{size}Gi"}},
    }
    claim = _object("v1", "PersistentVolumeClaim", case, {"spec": spec})
    return {**claim, "metadata": {**claim["metadata"], "name": _claim(case)}}


def kubernetes_objects(case: ExportCase) -> list[JsonObject]:
    """Return the objects in the order of application."""
    data = launch_files(case)
    files = [_models(case)]
    files += [_object("v1", "ConfigMap", case, {"data": data})] if data else []
    if is_training(case):
        rendezvous = [_service(case, headless=True)] if case.nodes > 1 else []
        return [*files, *rendezvous, _job(case)]
    if _spans_nodes(case):
        return [*files, _service(case, headless=True), _stateful_set(case)]
    return [*files, _service(case, headless=False), _deployment(case)]


def _spans_nodes(case: ExportCase) -> bool:
    """Return whether the pods of the plan are ranks of one server or job."""
    return case.nodes > 1 and (is_training(case) or separate_servers(case) < case.nodes)


def _labels(case: ExportCase) -> JsonObject:
    return {"app.kubernetes.io/name": object_name(case)}


def _service(case: ExportCase, *, headless: bool) -> JsonObject:
    port = PORT if is_training(case) else SERVING_PORT
    spec: JsonObject = {"selector": _labels(case), "ports": [{"name": "main", "port": port}]}
    if headless:
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, **spec}
    return _object("v1", "Service", case, {"spec": spec})


def _deployment(case: ExportCase) -> JsonObject:
    spec = {
        "replicas": separate_servers(case),
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _labels(case)},
        "template": _pod(case, kind="Deployment"),
    }
    return _object("apps/v1", "Deployment", case, {"spec": spec})


def _stateful_set(case: ExportCase) -> JsonObject:
    spec = {
        "replicas": case.nodes,
        "serviceName": object_name(case),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(case)},
        "template": _pod(case, kind="StatefulSet"),
    }
    return _object("apps/v1", "StatefulSet", case, {"spec": spec})


def _job(case: ExportCase) -> JsonObject:
    spec: JsonObject = {"backoffLimit": 0, "template": _pod(case, kind="Job")}
    if case.nodes > 1:
        group = {"completionMode": "Indexed", "completions": case.nodes}
        spec = {**group, "parallelism": case.nodes, **spec}
    return _object("batch/v1", "Job", case, {"spec": spec})


def _object(version: str, kind: str, case: ExportCase, content: JsonObject) -> JsonObject:
    metadata = {"name": object_name(case), "labels": _labels(case)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _pod(case: ExportCase, *, kind: str) -> JsonObject:
    volumes: list[JsonObject] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": _claim(case)}})
    if launch_files(case):
        volumes.append({"name": "files", "configMap": {"name": object_name(case)}})
    spec: JsonObject = {"containers": [_container(case, kind)], "volumes": volumes}
    if is_training(case):
        spec["restartPolicy"] = "Never"
        spec |= {"subdomain": object_name(case)} if case.nodes > 1 else {}
    return {"metadata": {"labels": _labels(case)}, "spec": spec}


def _container(case: ExportCase, kind: str) -> JsonObject:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - a mount in the pod
    mounts.append({"name": "models", "mountPath": CACHE})
    if launch_files(case):
        mounts.append({"name": "files", "mountPath": WORKDIR})
    container: JsonObject = {
        "name": case.workload.kind,
        "image": image_of(case) or FALLBACK_IMAGE,
        "workingDir": WORKDIR,
        "command": _command(case),
        "env": _environment(case, kind),
        "volumeMounts": mounts,
    }
    resource = RESOURCES.get(vendor_of(case))
    if resource:
        spans = is_training(case) or _spans_nodes(case)
        pods = case.nodes if spans else separate_servers(case)
        container["resources"] = {"limits": {resource: case.devices // pods}}
    if not is_training(case):
        container["ports"] = [{"containerPort": SERVING_PORT}]
        probe = {"httpGet": {"path": "/health", "port": SERVING_PORT}}
        container["readinessProbe"] = {**probe, "periodSeconds": 10}
    return container


def _command(case: ExportCase) -> list[str]:
    alone = not is_training(case) and not _spans_nodes(case)
    script = None if alone else launch_script(case, contained=True)
    if script is not None:
        return ["bash", "-c", script]
    words = launch_arguments(case, contained=True)
    return [re.sub(r"\$([A-Z_]+)", r"$(\1)", word) for word in words]  # variables of Kubernetes


def _environment(case: ExportCase, kind: str) -> list[JsonObject]:
    variables = launch_environment(case)
    entries: list[JsonObject] = [
        {"name": name, "value": value} for name, value in variables.items()
    ]
    entries += [{"name": "HF_HOME", "value": CACHE}, HF_TOKEN]
    if is_training(case) and launch_files(case):  # the folder of the script is read-only
        entries += [{"name": "DATA", "value": TEXT}, {"name": "OUTPUT", "value": OUTPUT}]
    if not _spans_nodes(case):
        return entries
    first = f"{object_name(case)}-0.{object_name(case)}"
    field = f"metadata.labels['{INDEX_LABELS[kind]}']"
    rank = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": field}}}
    return [{"name": "MASTER_ADDR", "value": first}, rank, *entries]


def kubernetes_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the export leaves to the user."""
    notes = _image_notes(case)
    notes.append(
        "a gated model needs your token: kubectl create secret generic huggingface "
        "--from-literal=token=…"
    )
    if case.device.kind not in {"cpu", "gpu"} and vendor_of(case) not in RESOURCES:
        notes.append("add the resource that your cluster calls this device")
    if is_training(case):
        where = f"the text as {TEXT} and a volume for the result as {OUTPUT}"
        notes.append(f"mount {where}" if launch_files(case) else "mount the data and the result")
    # The service balances between the pods.
    return (*notes, *(note for note in launch_notes(case) if not note.endswith(BALANCER)))


def kubernetes_text(case: ExportCase) -> str:
    """Return the objects as one YAML stream."""
    return "---\n".join(yaml_text(manifest) for manifest in kubernetes_objects(case))


KUBERNETES = Format(
    "kubernetes", "Kubernetes", "kubernetes.yaml", kubernetes_text, kubernetes_notes
)
