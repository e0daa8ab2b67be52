"""A Kubernetes API server over HTTP whose pods are processes of this machine.

It knows what our launcher asks: Jobs (strictly checked against a release's types), their pods,
nodes, priority classes, Kueue's queues if there are any, and the release. A Job's pods start when
it is created, unless the cluster is told to hold them; deleting it sends SIGTERM, and SIGKILL
after the grace. ``answers`` are given instead of the real ones, each once: a status with a body,
or a way to fail.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.runners.cluster.types import faults

RELEASE = "1.36"
NODE = {
    "metadata": {"name": "n1", "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
    "spec": {},
    "status": {
        "allocatable": {"cpu": "64", "memory": "515940152Ki", "nvidia.com/gpu": "8"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


class Pod:
    """A pod, and the process that is its container."""

    def __init__(self, job: dict[str, Any], index: int) -> None:
        template = job["spec"]["template"]
        self.name = f"{job['metadata']['name']}-{index}"
        self.labels = {**template["metadata"]["labels"], "job-name": job["metadata"]["name"]}
        self.container = template["spec"]["containers"][0]
        self.index = index
        self.process: subprocess.Popen[bytes] | None = None
        self.status: dict[str, Any] = {"phase": "Pending"}  # stated; else the process decides
        self.kill_at = float("inf")
        self.deleted: dict[str, str] = {}  # to its metadata
        self.conditions: list[dict[str, str]] = []

    def start(self) -> None:
        fields = {"status.podIP": "127.0.0.1"}
        env = {
            each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in self.container["env"]
        }
        image = {
            name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ
        }
        self.process = subprocess.Popen(
            self.container["command"],
            cwd=self.container["workingDir"],
            env=image | env | {"JOB_COMPLETION_INDEX": str(self.index)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.status = {}

    @property
    def is_alive(self) -> bool:
        if self.process and self.process.poll() is None and time.monotonic() > self.kill_at:
            self.signal(signal.SIGKILL)
        return self.process.poll() is None if self.process else False

    def signal(self, number: int) -> None:
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def disrupt(self, reason: str, message: str, grace_seconds: float) -> None:
        """End the pod as an eviction or a preemption does, which first says so."""
        told = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        self.conditions.append(told)
        self.end(grace_seconds)

    def end(self, grace_seconds: float) -> None:
        self.deleted = {"deletionTimestamp": "2026-12-01T00:00:00Z"}
        self.signal(signal.SIGTERM if grace_seconds else signal.SIGKILL)
        self.kill_at = min(self.kill_at, time.monotonic() + grace_seconds)

    def document(self) -> dict[str, Any]:
        status = self.status
        if not status:
            code = self.process.poll() if self.process else None
            status = {"phase": {None: "Running", 0: "Succeeded"}.get(code, "Failed")}
            status["conditions"] = self.conditions
        metadata = {"name": self.name, "labels": self.labels, **self.deleted}
        return {"metadata": metadata, "spec": {"nodeName": f"n{self.index + 1}"}, "status": status}


class FakeCluster:
    """The cluster's state, and the server that tells of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.started: list[Pod] = []
        self.events: dict[str, str] = {}  # a Job's last warning, by its name
        self.queues: list[dict[str, Any]] = []  # none: without Kueue
        self.prefers_a_version = True
        self.classes: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []  # pods that somebody else made
        self.logs: dict[str, str] = {}  # of others' pods, by name
        self.is_holding = False
        self.answers: list[tuple[int, Any] | str] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        threading.Thread(  # which close waits for
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @property
    def kubeconfig(self) -> Path:
        """Write and return a kubeconfig with this cluster as its current context."""
        path = self.folder / "kubeconfig"
        server = f"http://127.0.0.1:{self.server.server_address[1]}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": server}}],
                    "users": [{"name": "u", "user": {"token": "a-token"}}],
                    "contexts": [{"name": "k", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "k",
                }
            )
        )
        return path

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for pod in self.started:
            pod.signal(signal.SIGKILL)
            if pod.process:
                pod.process.wait(10)

    def create(self, job: dict[str, Any]) -> tuple[int, Any]:
        name = job["metadata"]["name"]
        if found := list(faults(job, RELEASE)):
            return 422, _status(422, f'Job "{name}" is invalid: {"; ".join(found)}')
        if name in self.jobs:
            return 409, _status(409, f'jobs.batch "{name}" already exists')
        self.jobs[name] = job
        number = job["spec"].get("completions", 1)
        self.pods[name] = [Pod(job, index) for index in range(number)]
        self.started += self.pods[name]
        if not self.is_holding and not job["spec"].get("suspend"):
            self.admit(name)
        return 201, job

    def admit(self, name: str) -> None:
        self.jobs[name]["spec"]["suspend"] = False
        for pod in self.pods[name]:
            pod.start()

    def delete(self, name: str, grace: float) -> tuple[int, Any]:
        self.jobs[name]["metadata"].setdefault("deletionTimestamp", "now")
        for pod in self.pods[name]:
            pod.end(grace)
        return 200, self.jobs[name]

    def listed(self, selector: str) -> list[Pod]:
        wanted = dict(each.partition("=")[::2] for each in selector.split(",") if each)
        every = [each for pods in self.pods.values() for each in pods]
        return [each for each in every if wanted.items() <= each.labels.items()]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        url = urlsplit(path)
        query = parse_qs(url.query)
        selector = query.get("labelSelector", [""])[0]
        about = re.search(r"involvedObject.name=([^,]*)", query.get("fieldSelector", [""])[0])
        name, _, value = selector.partition("=")
        found = re.fullmatch(
            r"/(?:apis?/(?:.*/)?)?(jobs|pods|nodes|events|version|localqueues|priorityclasses|kueue[^/]*)"
            r"(?:/(.*))?",
            url.path,
        )
        kind, one = found.groups() if found else ("", "")
        jobs, pods = list(self.jobs.values()), self.listed(selector)
        answers = {
            ("GET", "jobs"): lambda: {
                "items": [each for each in jobs if each["metadata"]["labels"].get(name) == value]
            },
            ("GET", "pods"): lambda: {
                "items": self.others if "!=" in selector else [each.document() for each in pods]
            },
            ("DELETE", "pods"): lambda: (
                [each.end(body["gracePeriodSeconds"]) for each in pods] and {}
            ),
            ("GET", "nodes"): lambda: {"items": [NODE, NODE]},
            ("GET", "events"): lambda: {
                "items": [
                    {"message": self.events[each]} for each in self.events if each == about[1]
                ]
            },
            ("GET", "version"): lambda: {"gitVersion": "v1.36.1"},
            ("GET", "priorityclasses"): lambda: {"items": self.classes},
        }
        if self.queues:
            version = {"groupVersion": "kueue.x-k8s.io/v1beta2"}
            group = {"name": "kueue.x-k8s.io", "versions": [version]}
            preferred = {"preferredVersion": version} if self.prefers_a_version else {}
            answers["GET", "kueue.x-k8s.io"] = lambda: group | preferred
            answers["GET", "localqueues"] = lambda: {"items": self.queues}
        if (method, kind) == ("POST", "jobs"):
            return self.create(body)
        if one and kind == "pods":
            return self.other(one)
        if one and one not in self.jobs:
            return 404, _status(404, f'jobs.batch "{one}" not found')
        if one:
            grace = body.get("gracePeriodSeconds", 30)
            return (200, self.jobs[one]) if method == "GET" else self.delete(one, grace)
        if (method, kind) in answers:
            return 200, answers[method, kind]()
        return 404, _status(404, f"the server could not find {url.path}")

    def other(self, name: str) -> tuple[int, Any]:
        """Return a pod that somebody else made, or its log."""
        pods: dict[str, Any] = {each["metadata"]["name"]: each for each in self.others}
        known = pods | {f"{pod}/log": log for pod, log in self.logs.items()}
        return (200, known[name]) if name in known else (404, _status(404, f"no {name}"))

    def has_ended(self, name: str) -> bool:
        """Return whether a Job is over, also while no agent asks."""
        with self.lock:
            self.settle()
            return name not in self.jobs or bool(self.jobs[name].get("status"))

    def settle(self) -> None:
        """Let ended Jobs become complete or failed, and deleted ones disappear."""
        for name, job in list(self.jobs.items()):
            pods = self.pods[name]
            if any(pod.is_alive for pod in pods) or not any(pod.process for pod in pods):
                if "deletionTimestamp" in job["metadata"] and not any(
                    each.is_alive for each in pods
                ):
                    del self.jobs[name], self.pods[name]
                if any(pod.process and pod.process.poll() for pod in pods):  # one has failed
                    for pod in pods:
                        pod.signal(signal.SIGTERM)
                continue
            if "deletionTimestamp" in job["metadata"]:
                del self.jobs[name], self.pods[name]
                continue
            ok = all(pod.process and pod.process.returncode == 0 for pod in pods)
            word = {"type": "Complete" if ok else "Failed", "status": "True"}
            job.setdefault("status", {}).setdefault("conditions", [word])


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


def _handler(cluster: FakeCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits 40 ms for its head's acknowledgement

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            with cluster.lock:
                cluster.requests.append(f"{self.command} {urlsplit(self.path).path}")
                if cluster.answers:
                    given = cluster.answers.pop(0)
                    if given == "close":
                        self.close_connection = True
                        return
                    code, reply = given
                else:
                    code, reply = self._real(body)
            text = reply if isinstance(reply, str) else json.dumps(reply)
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def _real(self, body: dict[str, Any]) -> tuple[int, Any]:
            if self.headers.get("Authorization") != "Bearer a-token":
                return 401, _status(401, "Unauthorized")
            cluster.settle()
            return cluster.answer(self.command, self.path, body)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - names of the base class

    return Handler
