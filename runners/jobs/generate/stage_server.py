"""A server of a chain: it runs decoder layers on the hidden states that the client sends.

``python -m runners.jobs.generate.stage_server ATTEMPT_DIR ADDRESS PORT`` connects to the client;
the chain's key is read from stdin in hexadecimal. The client chooses the layers. After a lost
connection the server reconnects without any layers, and the client replays.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from runners.jobs.generate.link import Link, LinkClosedError, LinkMessage
from runners.jobs.generate.stage_model import Call, Layers
from runners.jobs.loading import TORCH_DTYPES, pick_device
from runners.jobs.model_files import opened_model
from runners.jobs.runtime import BadInputError, Job, open_job, prepare_process
from runners.jobspec import ArtefactModel, FolderModel, GenerateSpec
from runners.jobspec.generate import StageChain
from runners.processes import die_with

EXIT_LOST = 4  # the client was unreachable for longer than the job allows
PAUSE_SECONDS = 0.2


class Place(NamedTuple):
    """The client's address, and the key that authenticates to it."""

    address: str
    port: int
    key: bytes


class Server:
    """The layers that the client of one connection has assigned."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._held: dict[int, Layers] = {}

    def serve(self, link: Link) -> None:
        """Serve requests until the client sends the end.

        Raises:
            LinkClosedError: the connection broke.
        """
        link.wait_at_most(None)
        while True:
            message = link.receive()
            if message.order.get("order") == "end":
                return
            try:
                hidden = self._answer(message)
            except BadInputError as error:
                link.send({"refused": str(error)})
                continue
            link.send({}, {} if hidden is None else {"hidden": hidden})

    def _answer(self, message: LinkMessage) -> torch.Tensor | None:
        order, tensors = message
        request, stage = order["order"], int(order["stage"])
        if request == "take":
            which = range(int(order["first"]), int(order["end"]))
            self._held[stage] = Layers(self._folder, which, pick_device(), self._dtype)
        elif request == "forget":
            self._held[stage].forget(int(order["session"]))
        else:
            call = Call(int(order["session"]), tensors["positions"], tensors.get("mask"))
            return self._held[stage].run(call, tensors["hidden"])
        return None


def serve_until_end(job: Job, place: Place) -> None:
    """Serve the client; reconnect whenever the connection breaks.

    Raises:
        LinkClosedError: the client was unreachable for longer than the job allows.
        BadInputError: this host cannot serve the model.
    """
    spec = job.spec_of(GenerateSpec)
    if not isinstance(spec.split, StageChain):
        raise BadInputError("the job requests no chain of stages")
    if not isinstance(spec.model, FolderModel | ArtefactModel):
        msg = f"stages read their layers from a model folder; source {spec.model.source} has none"
        raise BadInputError(msg)
    folder = opened_model(spec.model, job.host_dir)
    wait_seconds = spec.parallel.start_timeout_seconds  # hosts start at different times
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            link = Link.dialled(*place)
        except LinkClosedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_SECONDS)
            continue
        with contextlib.suppress(LinkClosedError), contextlib.closing(link):
            Server(folder, TORCH_DTYPES[spec.weight_dtype]).serve(link)
            return
        deadline = time.monotonic() + spec.split.patience_seconds


def main(attempt_dir: str, address: str, port: str) -> None:
    """Run a server in a process started by the client or by a host of the chain."""
    die_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the client stops the server
    key = bytes.fromhex(sys.stdin.readline().strip())
    prepare_process()
    job = open_job(Path(attempt_dir), "generate")
    try:
        serve_until_end(job, Place(address, int(port), key))
    except LinkClosedError as error:
        sys.stderr.write(f"a stage server ends: {error}\n")
        sys.exit(EXIT_LOST)
    except BadInputError as error:
        sys.stderr.write(f"{error.prefix}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
