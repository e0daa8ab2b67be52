"""A training of two ranks of which one falls silent in the middle of a step, and never ends.

``python -m tests.system.jobs.train.silenced FOLDER`` says of each layout how long the other one
waited. All layouts wait side by side.
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runners.jobs.ranks import RankFailedError, Ranks
from runners.jobspec import DataParallel
from tests.stack import free_port
from tests.system.jobs.train.laid_out import PP, TP, import_what_training_imports, trainer_of

START_SECONDS, PATIENCE_SECONDS = 120.0, 5.0
SILENT_FROM = 2  # steps are behind it
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": PP,
    "interleaved": {**PP, "pipeline_schedule": "interleaved", "virtual_pipeline_size": 2},
    "ring": {"context_parallel_size": 2, "context_method": "ring"},
    "gathered": {"context_parallel_size": 2},
    "tensor": TP,
}


def on_rank(name: str, rank: int, port: int, folder: Path) -> None:
    """Train until the second rank stops itself; note how long the first one waited for it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start = timedelta(seconds=START_SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=start)
    policy = DataParallel(rank_timeout_seconds=PATIENCE_SECONDS)
    ranks = Ranks(rank, 2, lead=0, local_rank=rank)
    trainer = trainer_of("llama", LAYOUTS[name], ranks, folder, parallel=policy, max_steps=1000)
    began = [0.0]

    def fall_silent(*_args: object) -> None:
        began[0] = time.monotonic()
        if rank == 1 and trainer.state.step == SILENT_FROM:
            os.kill(os.getpid(), signal.SIGSTOP)

    for stage in trainer.layout.stages:
        stage.register_forward_pre_hook(fall_silent)
    try:
        trainer.run()
    except RankFailedError as error:
        found = {"waited": time.monotonic() - began[0], "words": str(error)}
        (folder / f"{name}.json").write_text(json.dumps(found | {"step": trainer.state.step}))


def start(name: str, folder: Path) -> list[int]:
    """Fork both ranks of a layout."""
    port, pids = free_port(), []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            try:
                on_rank(name, rank, port, folder)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        pids.append(pid)
    return pids


def main() -> None:
    """Start every layout; a silent rank is killed once the other one has ended."""
    torch.set_num_threads(1)
    import_what_training_imports()
    folder = Path(sys.argv[1])
    for pids in [start(name, folder) for name in LAYOUTS]:
        os.waitpid(pids[0], 0)
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)


if __name__ == "__main__":
    main()
