"""Read the command of a container from a Docker Compose file or from Kubernetes objects."""

import re
from collections.abc import Iterator
from typing import Any

from planner.imports.shell import Command, Script, read_script
from planner.specs.base import BadRequestError, JsonObject

# Kubernetes writes a variable $(NAME), Compose ${NAME} and a plain dollar $$.
KUBERNETES_VARIABLE = re.compile(r"\$\(([A-Za-z_]\w*)\)", re.ASCII)


def is_container_file(document: JsonObject) -> bool:
    """Return whether a mapping is a Docker Compose file or a Kubernetes object."""
    return isinstance(document.get("services"), dict) or "apiVersion" in document


def container_script(documents: list[Any]) -> Script:
    """Return the commands of the first container that has one, with the files mounted beside it.

    The container's other settings are those of the script: its devices, its environment, and words
    for the rest.

    Raises:
        BadRequestError: no container has a command.
    """
    script = Script()
    for document in documents:
        if not isinstance(document, dict):
            continue
        script.files |= _files(document)
        for container in _containers(document):
            words = _words(container)
            if words and not script.commands:
                script.commands = _commands(words)
                _add_settings(script, container)
            elif container:
                script.beside.append(("another container", str(container.get("image", ""))))
    if not script.commands:
        raise BadRequestError(
            "no container of the file has a command: paste the command that it runs", "text"
        )
    return script


def server_replicas(documents: list[Any]) -> int:
    """Return how many servers of their own a Kubernetes Deployment starts, 1 for other files."""
    for document in documents:
        if isinstance(document, dict) and document.get("kind") == "Deployment":
            spec = document.get("spec")
            replicas = spec.get("replicas") if isinstance(spec, dict) else None
            if isinstance(replicas, int) and not isinstance(replicas, bool) and replicas > 1:
                return replicas
    return 1


def _containers(document: JsonObject) -> Iterator[JsonObject]:
    """Yield the services of a Compose file, or the containers of a Kubernetes object."""
    services = document.get("services")
    if isinstance(services, dict):
        yield from (each for each in services.values() if isinstance(each, dict))
        return
    pending: list[Any] = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            found = value.get("containers")
            yield from (each for each in found or () if isinstance(each, dict))
            pending += [inner for name, inner in value.items() if name != "containers"]


def _words(container: JsonObject) -> list[str]:
    """Return the words of a container: image, entry point, command and arguments."""
    words: list[str] = []
    for name in ("entrypoint", "command", "args"):
        value = container.get(name)
        if isinstance(value, list):
            words += [str(each) for each in value]
        elif isinstance(value, str):
            words += [word for each in read_script(value).commands for word in each.words]
    image = container.get("image")
    started = [word.replace("$$", "$") for word in words]
    started = [KUBERNETES_VARIABLE.sub(r"$\1", word) for word in started]
    # An image that starts a server takes the arguments after its name.
    return ["container", image, *started] if isinstance(image, str) and started else started


def _add_settings(script: Script, container: JsonObject) -> None:
    """Record what a container states beside its command."""
    environment = container.get("environment", container.get("env"))
    pairs: list[tuple[str, str]] = []
    if isinstance(environment, dict):
        pairs = [(str(name), _text(value)) for name, value in environment.items()]
    for each in environment if isinstance(environment, list) else ():
        if isinstance(each, dict):
            pairs.append((str(each.get("name")), _text(each.get("value"))))
        else:
            name, _, value = str(each).partition("=")
            pairs.append((name, value))
    script.commands[0].variables += pairs
    for path, value in _leaves(container):
        name = path.rpartition(".")[2]
        is_count = path.startswith("deploy.") and name == "count"
        if is_count or name in DEVICE_LIMITS or path == "gpus":
            script.devices.append((f"{path}: {_text(value)}", _text(value)))
        elif path.split(".")[0] not in COMMAND_KEYS:
            script.beside.append((path, _text(value)))


DEVICE_LIMITS = frozenset({"nvidia/gpu", "amd/gpu", "intel/gpu"})
COMMAND_KEYS = frozenset(
    {"entrypoint", "command", "args", "environment", "env", "image", "configs"}
)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - as in YAML
    """Yield the settings of a container by dotted path; a list of plain values is one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            key = str(name).replace(".com/", "/")
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for each in value:
            yield from _leaves(each, path)
    else:
        yield path, value


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def _commands(words: list[str]) -> list[Command]:
    """Return a container's command, or the commands of the script that its shell runs."""
    for at, word in enumerate(words[:-2]):
        is_shell = word.rsplit("/", 1)[-1] in {"bash", "sh"}
        if is_shell and re.fullmatch(r"-\w*c", words[at + 1], re.ASCII):
            return read_script(words[at + 2]).commands
    return [Command(words)]


def _files(document: JsonObject) -> dict[str, str]:
    """Return the files of a ConfigMap or of Compose's configs, by name."""
    data, configs = document.get("data"), document.get("configs")
    files = {str(name): str(text) for name, text in data.items()} if isinstance(data, dict) else {}
    services = document.get("services")
    if not isinstance(configs, dict) or not isinstance(services, dict):
        return files
    for service in services.values():
        mounts = service.get("configs") if isinstance(service, dict) else None
        for mount in mounts if isinstance(mounts, list) else ():
            source = mount.get("source") if isinstance(mount, dict) else None
            content = configs.get(source) if isinstance(source, str) else None
            if isinstance(content, dict) and isinstance(mount.get("target"), str):
                name = mount["target"].rsplit("/", 1)[-1]
                files[name] = str(content.get("content", ""))
    return files
