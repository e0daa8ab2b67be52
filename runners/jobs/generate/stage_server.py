"""One server of a chain: it holds runs of layers, and computes what the client sends.

``python -m runners.jobs.generate.stage_server ATTEMPT_DIR ADDRESS PORT`` dials the client; the
chain's key comes on stdin as hexadecimal digits. What it holds is the client's choice. When the
connection breaks it dials again, with nothing held: the client replays.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from runners.generate_options import StageChain
from runners.jobs.generate.link import Link, LinkLostError, Said
from runners.jobs.generate.stage_model import Call, Layers
from runners.jobs.loading import TORCH_DTYPES, pick_device
from runners.jobs.model_folders import opened_model
from runners.jobs.runtime import BadInputError, Job, open_job, prepare_process
from runners.jobspec import ArtefactModel, FolderModel, GenerateSpec
from runners.parentage import die_with

EXIT_LOST = 4  # the client was not there for as long as the job allows
PAUSE_SECONDS = 0.2


class Place(NamedTuple):
    """Where the client listens, and what proves that one belongs to its chain."""

    address: str
    port: int
    key: bytes


class Server:
    """The layers that one connection's client has asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._held: dict[int, Layers] = {}

    def serve(self, link: Link) -> None:
        """Answer until the client says that nothing more comes.

        Raises:
            LinkLostError: the connection broke.
        """
        link.wait_at_most(None)
        while True:
            said = link.receive()
            if said.order.get("order") == "end":
                return
            try:
                hidden = self._answer(said)
            except BadInputError as error:
                link.send({"refused": str(error)})
                continue
            link.send({}, {} if hidden is None else {"hidden": hidden})

    def _answer(self, said: Said) -> torch.Tensor | None:
        order, tensors = said
        name, stage = order["order"], int(order["stage"])
        if name == "take":
            which = range(int(order["first"]), int(order["end"]))
            self._held[stage] = Layers(self._folder, which, pick_device(), self._dtype)
        elif name == "forget":
            self._held[stage].forget(int(order["session"]))
        else:
            call = Call(int(order["session"]), tensors["positions"], tensors.get("mask"))
            return self._held[stage].run(call, tensors["hidden"])
        return None


def serve_until_end(job: Job, place: Place) -> None:
    """Serve the client, dialling again whenever the connection breaks.

    Raises:
        LinkLostError: the client was not reached for as long as the job allows.
        BadInputError: the model cannot be served from here.
    """
    spec = job.spec_of(GenerateSpec)
    if not isinstance(spec.split, StageChain):
        raise BadInputError("the job asks for no chain of stages")
    if not isinstance(spec.model, FolderModel | ArtefactModel):
        msg = f"stages read their layers from a model folder; source {spec.model.source} has none"
        raise BadInputError(msg)
    folder = opened_model(spec.model, job.host_dir)
    wait_seconds = spec.parallel.start_timeout_seconds  # hosts start as slowly as they do
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            link = Link.dialled(*place)
        except LinkLostError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_SECONDS)
            continue
        with contextlib.suppress(LinkLostError), contextlib.closing(link):
            Server(folder, TORCH_DTYPES[spec.weight_dtype]).serve(link)
            return
        deadline = time.monotonic() + spec.split.patience_seconds


def main(attempt_dir: str, address: str, port: str) -> None:
    """Serve as the process of its own that a client or a host of the chain starts."""
    die_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the client says when nothing more comes
    key = bytes.fromhex(sys.stdin.readline().strip())
    prepare_process()
    job = open_job(Path(attempt_dir), "generate")
    try:
        serve_until_end(job, Place(address, int(port), key))
    except LinkLostError as error:
        sys.stderr.write(f"a stage server ends: {error}\n")
        sys.exit(EXIT_LOST)
    except BadInputError as error:
        sys.stderr.write(f"{error.prefix}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
