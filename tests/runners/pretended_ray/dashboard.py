"""A Ray dashboard over HTTP whose jobs are processes of this machine with a pretended Ray.

It has the Jobs API and the list of nodes, with the statuses and bodies that Ray 2.60 gives.
``answers`` are given instead of the real ones, each once: a status with a body, or "close".
"""

import json
import os
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "a-token"
DUPLICATE = (
    "Traceback (most recent call last):\n  File job_head.py\n"
    "RuntimeError: Request failed with status code 400: Traceback (most recent call last):\n"
    "ValueError: Job with submission_id {} already exists. "
    "Please use a different submission_id.\n.\n"
)


def node(name: str, **resources: float) -> dict[str, Any]:
    """Return a node as ``ray.nodes()`` has it; without resources one of a usual size."""
    usual = {"CPU": 4.0, "GPU": 2.0, "memory": 2.0**34, "accelerator_type:H100": 1.0}
    return {
        "NodeID": f"id-{name}",
        "NodeName": name,
        "Alive": True,
        "Resources": resources or usual,
    }


class Dashboard:
    """The cluster's state, and the server that tells of it."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.state, self.groups = folder / "nodes.json", folder / "groups.jsonl"
        self.set_nodes(node("head", CPU=1.0, memory=2.0**33), *map(node, names))
        self.jobs: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()
        self.answers: list[tuple[int, str] | str] = []
        self.is_holding = self.asks_for_token = False
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def set_nodes(self, *nodes: dict[str, Any]) -> None:
        temporary = self.state.with_suffix(".new")
        temporary.write_text(json.dumps(nodes))
        temporary.replace(self.state)

    def change(self, name: str, **fields: object) -> None:
        """Change a node: Alive, or busy."""
        found = json.loads(self.state.read_text())
        self.set_nodes(*[each | fields if each["NodeName"] == name else each for each in found])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def submit(self, job: dict[str, Any]) -> tuple[int, Any]:
        name = job["submission_id"]
        if name in self.jobs:
            return 500, DUPLICATE.format(name)
        self.jobs[name] = {**job, "status": "PENDING", "message": "Job has not started yet.",
                           "end_time": None}  # fmt: skip
        if not self.is_holding:
            kept = {each: os.environ[each] for each in ("PATH", "HOME") if each in os.environ}
            told = {"PYTHONPATH": str(Path(__file__).parent), "PRETENDED_RAY": str(self.state)}
            self.processes[name] = subprocess.Popen(
                ["/bin/sh", "-c", job["entrypoint"]], env=kept | told, start_new_session=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        return 200, {"job_id": name, "submission_id": name}

    def stop(self, name: str) -> tuple[int, Any]:
        process = self.processes.get(name)
        if process and process.poll() is None and name not in self.stopped:
            self.stopped.add(name)
            process.terminate()
        if self.jobs[name]["status"] == "PENDING" and not process:
            self.jobs[name]["status"] = "STOPPED"
        return 200, {"stopped": True}

    def settle(self) -> None:
        for name, process in self.processes.items():
            code = process.poll()
            word = "RUNNING" if code is None else "FAILED" if code else "SUCCEEDED"
            is_stopped = code is not None and name in self.stopped
            self.jobs[name]["status"] = "STOPPED" if is_stopped else word
            if word == "FAILED" and not is_stopped:
                self.jobs[name]["message"] = f"Job entrypoint command failed with exit code {code}"
            if code is not None:
                self.jobs[name].setdefault("ended", time.time())

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.settle()
        name = path.removeprefix("/api/jobs/").removesuffix("/stop")
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": "2.60.0"}
        if path.startswith("/api/v0/nodes"):
            alive = [each for each in json.loads(self.state.read_text()) if each["Alive"]]
            listed = [
                {"node_id": each["NodeID"], "state": "ALIVE", "resources_total": each["Resources"]}
                for each in alive
            ]
            return 200, {"result": True, "data": {"result": {"result": listed}}}
        if path == "/api/jobs/":
            driver = {"type": "DRIVER", "submission_id": None, "status": "RUNNING"}
            return self.submit(body) if method == "POST" else (200, [*self.jobs.values(), driver])
        if name not in self.jobs:
            return 404, f"Job {name} does not exist"
        if method == "DELETE":
            del self.jobs[name]
            self.processes.pop(name, None)
            return 200, {"deleted": True}
        return self.stop(name) if path.endswith("/stop") else (200, self.jobs[name])


def _handler(cluster: Dashboard) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            with cluster.lock:
                given = cluster.answers.pop(0) if cluster.answers else None
                if given == "close":
                    self.close_connection = True
                    return
                is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                if given is None and cluster.asks_for_token and not is_known:
                    given = 401, "Unauthorized: Missing authentication token"
                code, reply = given or cluster.answer(self.command, self.path, body)
            text = reply if isinstance(reply, str) else json.dumps(reply)
            self.send_response(code)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - names of the base class

    return Handler
