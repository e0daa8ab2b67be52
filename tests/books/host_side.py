"""A host that claims an attempt and starts nothing: its launch documents, argv and environment."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from runners.host.reconcile import Reconciler
from runners.jobs.serve.relayed.backend import EngineAdapter, ModelPaths, split_engines
from runners.jobs.serve.relayed.process import Command, ListenAddress
from runners.jobs.serve.sglang.adapter import Sglang
from runners.jobs.serve.vllm import adapter as vllm
from runners.jobs.serve.vllm.adapter import Vllm
from runners.jobspec import ArtefactModel, FolderModel, ModelRef, ServeSpec
from runners.launchers import launch, slurm_commands
from runners.launchers.attempts import AttemptFolder
from runners.shared.config import HostConfig, HostDir
from runners.shared.messages import ClaimReply, RunRequest, WantedAttempt
from runners.supervision import child
from runners.supervision.supervisor import STARTED

BOOT_ID = "boot-1"
PORT, SIDE_PORT = 8001, 9001
KEY = "engine-key"
ENGINES: dict[str, type[EngineAdapter]] = {"vllm": Vllm, "sglang": Sglang}
ENVIRONMENT = {  # of the agent; only what a job may receive is passed on
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    "HOME": "/home/agent",
    "LANG": "C.UTF-8",
    "NCCL_IB_HCA": "mlx5_0",
    "PATH": "/usr/bin",
    "SECRET_TOKEN": "not passed on",
}


class Submitted(NamedTuple):
    """What Slurm was given: sbatch's options and the batch script."""

    options: list[str]
    script: str


class HostSide:
    """One host with 16 cores and two addresses, whose supervisor and Slurm are recorded."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.submitted: list[Submitted] = []
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        found = [
            SimpleNamespace(address=f"10.0.0.{number}", family=socket.AF_INET)
            for number in (1, 2, 3, 4)
        ]
        patch.setattr(psutil, "net_if_addrs", lambda: {"eth0": found})
        patch.setattr(psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
        patch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
        patch.setattr(launch, "start_supervisor", lambda _folder: STARTED)
        patch.setattr(slurm_commands, "queue", list)
        patch.setattr(slurm_commands, "submit", self._submit)
        patch.setattr(vllm, "free_ports", lambda _count, apart_from: SIDE_PORT)  # noqa: ARG005

    def _submit(self, options: list[str], script: Path) -> str:
        self.submitted.append(Submitted(options, script.read_text()))
        return "17"

    def launched(
        self, request: RunRequest, secrets: dict[str, str], **config: Any
    ) -> dict[str, Any]:
        """Return the spec that the job reads, and the launch document or why there is none."""
        host_dir = HostDir(self.folder / f"host-{request.attempt_id}")
        host_dir.make()
        for model in models_of(request.spec.model_dump(), []):
            place_model(model, host_dir)
        client = SimpleNamespace(
            claim=lambda _id, _request: ClaimReply(request=request, secrets=secrets)
        )
        settings = HostConfig.model_validate({"min_free_bytes": 0, **config})
        reconciler = Reconciler(host_dir, settings, client, boot_id=BOOT_ID)  # type: ignore[arg-type]
        reconciler.claim(WantedAttempt(attempt_id=request.attempt_id, fence=request.fence))
        folder = host_dir.attempts / request.attempt_id
        stored = json.loads((folder / "spec.json").read_text())
        document = {
            "spec.json": {name: value for name, value in stored.items() if name != "fence"},
            "launch.json": child.read_json(folder / child.LAUNCH),
            "exit.json": child.read_json(folder / child.EXIT_RECORD),
        }
        found = {name: value for name, value in document.items() if value is not None}
        if "exit.json" in found:
            refused = found["exit.json"]
            found["exit.json"] = {name: refused.get(name) for name in ("reason", "last_lines")}
        if self.submitted:
            found["sbatch"] = self.submitted[-1]._asdict()
        if isinstance(request.spec, ServeSpec) and request.spec.engine in ENGINES:
            env = found["launch.json"]["env"]
            found["engine"] = [
                {"argv": list(command.argv), "env": dict(command.env)}
                for command in self._engine_commands(request.spec, env)
            ]
        return found

    def _engine_commands(self, spec: ServeSpec, env: dict[str, str]) -> list[Command]:
        """Return the commands of an endpoint's engine, or engines, on GPUs."""
        model = self.folder / "engine-model"
        model.mkdir(exist_ok=True)
        (model / "tokenizer_config.json").write_text("{}")
        adapters = {}
        for each in spec.adapters:
            adapters[each.name] = model / each.name
            adapters[each.name].mkdir(exist_ok=True)
            (adapters[each.name] / "adapter_config.json").write_text('{"r": 8}')
        placed = ModelPaths(model, {}, adapters, model / "draft")
        engine, listen = ENGINES[spec.engine](), ListenAddress(PORT, KEY)
        options = spec.engine_options
        if options is None or options.split is None:
            return [engine.command(spec, placed, listen)]
        parts = split_engines(options.split, options, env)
        return [engine.part_command(spec, placed, listen, part) for part in parts]


def models_of(document: Any, found: list[ModelRef]) -> list[ModelRef]:
    """Return the models of a spec that must be in a folder of the host."""
    if isinstance(document, dict):
        if document.get("source") == "folder":
            found.append(FolderModel.model_validate(document))
        elif document.get("source") == "artefact":
            found.append(ArtefactModel.model_validate(document))
        for value in document.values():
            models_of(value, found)
    elif isinstance(document, list | tuple):
        for value in document:
            models_of(value, found)
    return found


def place_model(model: ModelRef, host_dir: HostDir) -> None:
    """Make the model's empty folder."""
    if isinstance(model, FolderModel):
        (host_dir.models / model.path).mkdir(parents=True, exist_ok=True)
    if isinstance(model, ArtefactModel):
        earlier = AttemptFolder(host_dir.attempts / model.attempt_id)
        (earlier.output / model.name).mkdir(parents=True, exist_ok=True)
        earlier.forget()  # the server has its events, and the output is left
