"""Export a plan on one node as a Docker Compose file."""

from planner.exports.export import SERVING_PORT, ExportCase, Format, Notes
from planner.exports.launch import (
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
from planner.exports.replicas import servers_per_node
from planner.exports.yaml_text import yaml_text
from planner.specs.base import JsonObject

FALLBACK_IMAGE = "IMAGE"
WORKDIR = "/workspace"
CACHE = "/huggingface"


def compose_document(case: ExportCase) -> JsonObject:
    """Return the file's content: one service with its devices and files."""
    service: JsonObject = {
        "image": image_of(case) or FALLBACK_IMAGE,
        "working_dir": WORKDIR,
        "entrypoint": [],
        "command": _command(case),
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


def _command(case: ExportCase) -> list[str]:
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


def compose_notes(case: ExportCase) -> Notes:
    """Return what the file leaves open."""
    notes = ["the image's tag moves: pin the version that you measure"]
    if image_of(case) is None:
        notes.append(f"no public image for {case.device.vendor}: put your own for IMAGE")
    if case.nodes > 1:
        notes.append("start it on every node with MASTER_ADDR and NODE_RANK set")
    return (*notes, *launch_notes(case))


def compose_text(case: ExportCase) -> str:
    """Return the file as YAML."""
    return yaml_text(compose_document(case))


COMPOSE = Format("compose", "Docker Compose", "compose.yaml", compose_text, compose_notes)
