"""Helm itself, by the shared library of the PyPI package ``helm-sdkpy``: lints, renders a chart.

``python -m tests.system.deploy.helm LIBRARY CHART``, with values as JSON on standard input, prints
a JSON document: what lint says, and the manifests and hooks of an installation. The library has no
``template``: Helm installs into an API server of ours, which knows the kinds and keeps Helm's own
record of the release. It runs in a process of its own, for Go's signal handlers.
"""

import base64
import ctypes
import gzip
import json
import re
import sys
import tempfile
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RELEASE, NAMESPACE = "team", "ml"
KINDS = {
    "v1": {
        "PersistentVolumeClaim": "persistentvolumeclaims", "Secret": "secrets",
        "Service": "services", "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments"},
    "batch/v1": {"Job": "jobs"},
    "networking.k8s.io/v1": {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "rbac.authorization.k8s.io/v1": {
        "ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings",
        "Role": "roles", "RoleBinding": "rolebindings",
    },
}  # fmt: skip
RECORD = re.compile(rb"H4sI[A-Za-z0-9+/=]+")  # gzip in base64, within a Secret as JSON or protobuf
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class Server(BaseHTTPRequestHandler):
    """An API server without objects that keeps the first record of a release."""

    protocol_version = "HTTP/1.1"
    record: dict[str, Any] | None = None

    def log_message(self, *_args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        groups = [each for each in KINDS if "/" in each]
        found: dict[str, Any] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "groups": [group_of(each) for each in groups]},
            f"/api/v1/namespaces/{NAMESPACE}/secrets": {"kind": "SecretList", "items": []},
        } | {
            f"/api{'s' if '/' in each else ''}/{each}": resources_of(each, kinds)
            for each, kinds in KINDS.items()
        }
        self.answer(found.get(path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        text = body.replace(b"\\/", b"/")
        if Server.record is None and (found := RECORD.search(text)):
            Server.record = json.loads(gzip.decompress(base64.b64decode(found[0])))
        self.answer(None)  # the installation ends here: nothing is to be made

    def answer(self, document: dict[str, Any] | None) -> None:
        status = HTTPStatus.OK if document else HTTPStatus.NOT_FOUND
        known = {"apiVersion": "v1", "metadata": {}} | (document or {"kind": "Status"})
        body = json.dumps(known).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def group_of(version: str) -> dict[str, Any]:
    name, _, number = version.partition("/")
    served = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [served], "preferredVersion": served}


def resources_of(version: str, kinds: dict[str, str]) -> dict[str, Any]:
    rows = [
        {"name": name, "kind": kind, "singularName": "", "verbs": VERBS}
        | {"namespaced": not kind.startswith("Cluster")}
        for kind, name in kinds.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": rows}


def kubeconfig(port: int) -> str:
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    both = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "c"}
    return json.dumps({"apiVersion": "v1", "kind": "Config"} | both)


def main(library: str, chart: str) -> None:
    """Lint and install a chart; print both as JSON."""
    helm = ctypes.CDLL(library)
    helm.helm_sdkpy_last_error.restype = ctypes.c_char_p
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handle, linted, installed = ctypes.c_ulonglong(), ctypes.c_char_p(), ctypes.c_char_p()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kubeconfig"
        config.write_text(kubeconfig(server.server_port))
        helm.helm_sdkpy_config_create(
            NAMESPACE.encode(), str(config).encode(), None, b"{}", ctypes.byref(handle)
        )
        helm.helm_sdkpy_lint(handle, chart.encode(), ctypes.byref(linted))
        options = json.dumps({"wait": False, "timeout_seconds": 5, "server_side_apply": "false",
                              "disable_openapi_validation": True})  # fmt: skip
        helm.helm_sdkpy_install(handle, RELEASE.encode(), chart.encode(), sys.stdin.buffer.read(),
                                b"", options.encode(), ctypes.byref(installed))  # fmt: skip
        words = (helm.helm_sdkpy_last_error() or b"").decode()
    record = Server.record or {}
    said = {
        "lint": json.loads(linted.value or b"null"),
        "manifest": record.get("manifest", ""),
        "hooks": [each["manifest"] for each in record.get("hooks") or ()],
        "notes": (record.get("info") or {}).get("notes", ""),
        "refusal": "" if record else words,
    }
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
