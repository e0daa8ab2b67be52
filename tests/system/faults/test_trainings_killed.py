"""Divided trainings whose rank, launcher or supervisor is killed: the loss goes on unbroken.

Each runs as the product runs it: agent, supervisor, torchrun, two ranks. A killed rank starts
again within the attempt; what else is killed costs the attempt, and the next one goes on from
what it left on the host. The rate of learning says of each figure which step it is of.

The suite tells one of the stories; ``test_killed_ranks`` goes through the layouts without the
product around them.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from runners.supervision import procfs
from tests.plugins.extent import first
from tests.runners.jobs.tiny import tiny_training
from tests.stack import SLOW_S, wait_for
from tests.system.faults.site import Site
from tests.system.jobs.harness import Host

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS = 60
PATIENCE_SECONDS = 2 * SLOW_S  # ranks that exchange in each layer are slowest beside others
LOSS_TOLERANCE = 1e-3  # nats, after so many steps of rounding; AdamW's states lost: up to 0.046
PARALLEL = {"processes_per_host": 2, "on_lost_rank": "restart"}
STORIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ZeRO-3": ({"data_parallel_size": 2, "zero_stage": 3}, ("rank", "supervisor")),
    "tensor": ({"tensor_parallel_size": 2}, ("launcher",)),
    "pipeline": ({"pipeline_parallel_size": 2}, ("rank",)),
}


def spec_of(layout: dict[str, Any] | None) -> dict[str, Any]:
    """Return a training of seconds as a document; alone without a layout."""
    parallel = PARALLEL if layout else {}
    spec = tiny_training(
        max_steps=STEPS, sequence_length=32, micro_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=2e-3, checkpoint_every_seconds=0.1,
    )  # fmt: skip
    return spec.model_dump(mode="json") | {"layout": layout, "parallel": parallel}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Host:
    """Return a host for one process that nobody kills."""
    return Host(tmp_path_factory.mktemp("alone") / "host")


@pytest.fixture(scope="module")
def undisturbed(alone) -> list[tuple[float, float]]:
    """Return the rate and the loss of every step of that process."""
    from runners.jobs.train import job, trainer
    from runners.jobspec import TrainSpec

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "METRIC_INTERVAL_SECONDS", 0.0)
        ran = alone.run_here("undisturbed", TrainSpec.model_validate(spec_of(None)), job.work)
    rates, losses = ran.metric("learning_rate"), ran.metric("loss")
    assert len(rates) == len(losses) == STEPS
    return list(zip(rates, losses, strict=True))


class Told:
    """One training as it goes: where its newest checkpoint is, and whom to kill."""

    def __init__(self, site: Site, job: str) -> None:
        self.site, self.job, self.seen = site, job, ""

    def _folder(self) -> Path:
        return self.site.attempt_folder(self.job).path

    def _newest(self) -> str:
        kept = sorted(self._folder().glob("checkpoint/step-*"))
        return kept[-1].name if kept else ""

    def wait_for_checkpoint(self) -> None:
        """Wait until the training has made steps beyond what it was last resumed from."""
        what = f"a checkpoint after {self.seen or 'the start'} of {self.job}"
        self.seen = wait_for(
            lambda: newest if (newest := self._newest()) > self.seen else None, what, every_s=0.05
        )

    def kill(self, victim: str) -> None:
        """Kill one of its processes as the kernel would."""
        identity = self.site.identity(self.job)
        pids = {"supervisor": identity["pid"], "launcher": identity["child_pid"]}
        os.kill(pids.get(victim) or self._rank(), signal.SIGKILL)

    def _rank(self) -> int:
        marked = procfs.processes_of_attempt(self._folder().name)
        return next(each.pid for each in marked if b"\0LOCAL_RANK=1\0" in environment(each.pid))


def environment(pid: int) -> bytes:
    try:
        return (procfs.PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("name", first(STORIES))
def test_the_loss_goes_on_unbroken_from_the_last_checkpoint(site, alone, undisturbed, name):
    layout, victims = STORIES[name]
    cache = "cache"  # the tokens of the text take longer than the training
    shutil.copytree(alone.path / cache, site.hosts["ada"] / cache, dirs_exist_ok=True)
    job = site.train("ada", spec_of(layout), retries=1)
    told = Told(site, job)
    for victim in victims:
        told.wait_for_checkpoint()
        told.kill(victim)
    ended = site.wait(job, timeout_s=PATIENCE_SECONDS)
    figures = site.desk.figures(job=job)

    lost = {"supervisor": "supervisor_lost", "launcher": "killed_externally"}
    reasons = [*(lost[each] for each in victims if each in lost), "ok"]
    assert [each["exit"]["reason"] for each in ended["attempts"]] == reasons
    resumed_at = int(figures["notes"]["resumed"].removeprefix("from the checkpoint at step "))
    assert resumed_at >= int(told.seen.removeprefix("step-"))
    for rate, loss in figures["steps"]:
        same = [known for at, known in undisturbed if at == pytest.approx(rate, rel=1e-9)]
        assert any(loss == pytest.approx(each, abs=LOSS_TOLERANCE) for each in same), rate
    last_rate, last_loss = figures["steps"][-1]
    assert (last_rate, last_loss) == pytest.approx(undisturbed[-1], abs=LOSS_TOLERANCE)
