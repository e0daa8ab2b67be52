"""The fields of a Job and of what our chart has, in three releases of Kubernetes.

``types.json`` is read from the classes of the official clients, which are generated from each
release's OpenAPI document: ``python -m tests.runners.cluster.types FOLDER...`` remakes it from
folders into which ``kubernetes`` 34, 35 and 36 were unpacked. Reading a manifest with it is as
strict as an API server that is asked with ``fieldValidation=Strict``.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
ROOT = "V1Job"
# Kinds of the chart (``tests/system/deploy``), and a Job.
ROOTS = (
    ROOT, "V1ClusterRole", "V1ClusterRoleBinding", "V1Deployment", "V1Ingress", "V1NetworkPolicy",
    "V1PersistentVolumeClaim", "V1PodDisruptionBudget", "V1Role", "V1RoleBinding", "V1Secret",
    "V1Service", "V1ServiceAccount",
)  # fmt: skip
# "object" is a number or a text (IntOrString), or anything.
PLAIN = {"int": int, "float": (int, float), "str": str, "bool": bool, "object": object}
# Reachable, and in no manifest of ours.
LEFT_OUT = re.compile(r"V1\w+(Status|Condition)|.*(ManagedFields|VolumeSource)\b.*")
USED_SOURCES = (
    "V1EmptyDirVolumeSource", "V1PersistentVolumeClaimVolumeSource", "V1SecretVolumeSource",
)  # fmt: skip


def faults(value: Any, release: str, kind: str = ROOT, path: str = "") -> Iterator[str]:
    """Yield what an API server of a release would refuse in an object of a type."""
    if found := re.fullmatch(r"list\[(.*)\]", kind):
        for index, each in enumerate(value if isinstance(value, list) else ()):
            yield from faults(each, release, found[1], f"{path}[{index}]")
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no list"
    elif found := re.fullmatch(r"dict[(\[]str, (.*)[)\]]", kind):
        for key, each in value.items():
            yield from faults(each, release, found[1], f"{path}.{key}")
    elif kind in PLAIN:
        is_bool = isinstance(value, bool) and kind != "bool"
        if is_bool or not isinstance(value, PLAIN[kind]):
            yield f"{path}: {value!r} is no {kind}"
    else:
        yield from _object_faults(value, release, kind, path)


@cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    return dict(json.loads(TABLE.read_text()))


def _object_faults(value: Any, release: str, kind: str, path: str) -> Iterator[str]:
    fields: Mapping[str, Any] = _table()[release][kind]
    for name, each in value.items():
        if name not in fields:
            yield f"{path}.{name}: {kind} has no such field"
        else:
            yield from faults(each, release, fields[name][0], f"{path}.{name}")
    for name, (_, is_required) in fields.items():
        if is_required and value.get(name) is None:
            yield f"{path}.{name}: missing"


def read_release(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the types that are reached: field -> its type and whether it must be there."""
    models = folder / "kubernetes/client/models"
    found: dict[str, dict[str, Any]] = {}
    waiting = list(ROOTS)
    while waiting:
        kind = waiting.pop()
        if kind in found or kind in PLAIN:
            continue
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower()
        text = (models / f"{snake}.py").read_text()
        blocks = re.findall(
            r"    (openapi_types|attribute_map) = \{(.*?)\n    \}", text, re.DOTALL
        )
        tables = {name: dict(re.findall(r"'(\w+)': '([^']+)'", body)) for name, body in blocks}
        types = tables["openapi_types"]
        required = set(re.findall(r"Invalid value for `(\w+)`, must not be `None`", text))
        fields = {
            tables["attribute_map"][name]: [each, name in required]
            for name, each in types.items()
            if each in USED_SOURCES or not LEFT_OUT.fullmatch(each)
        }
        found[kind] = fields
        waiting += re.findall(r"\b[A-Z]\w+", " ".join(each for each, _ in fields.values()))
    return found


def main(folders: list[str]) -> None:
    """Write the table of the releases that were unpacked into folders."""
    table = {f"1.{Path(each).name.split('.')[0]}": read_release(Path(each)) for each in folders}
    TABLE.write_text(json.dumps(table, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
