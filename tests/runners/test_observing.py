"""Jobs that somebody else started: read by id from pretended schedulers, and reported once."""

import json
import os

import pytest

from runners.host.observed_jobs import REPORTED_AT_ONCE, ObservedJobs
from runners.launchers import job_logs, slurm_commands
from runners.launchers.job_logs import LogUnreadableError, figures_of, read_tail
from runners.launchers.observing import observe_pods, observe_slurm
from runners.launchers.slurm_commands import SlurmError, SlurmUnreachableError
from runners.shared.config import HostConfig
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.slurm import SlurmConfig
from tests.runners.test_kubernetes import PLAIN, cluster  # noqa: F401 -- a fixture

MEGATRON = (
    " [2025-04-13 23:41:12] iteration       20/    1000 | consumed samples:          320 | "
    "elapsed time per iteration (ms): 1147.6 | throughput per GPU (TFLOP/s/GPU): 410.5 | "
    "learning rate: 1.342E-04 | global batch size:    16 | lm loss: 7.399415E+00 |"
)
LINES = {  # a line of a program -> its figures
    MEGATRON: {
        "step": 20, "total_steps": 1000, "step_seconds": 1.1476, "loss": 7.399415,
        "device_flops_per_second": 410.5e12,
    },
    "[rank0]: step: 10  loss:  7.10250  grad_norm:  1.9  memory: 47.1GiB(59%)  tps: 8,532  "
    "tflops: 412.31  mfu: 41.69%": {
        "step": 10, "loss": 7.1025, "device_tokens_per_second": 8532,
        "device_flops_per_second": 412.31e12,
    },
    "{'loss': 2.31, 'grad_norm': 0.5, 'epoch': 0.1}": {"loss": 2.31},
    "{'loss': '2.31', 'epoch': '0.1'}": {"loss": 2.31},
    "validate step:  9  loss: 3.1": {}, "step:  9  loss: soon": {"step": 9}, "step 3 of 4": {}, "": {},
}  # fmt: skip


def test_well_known_lines_become_figures_in_base_units_and_others_none():
    for line, figures in LINES.items():
        assert figures_of([line]) == pytest.approx(figures), line
    assert figures_of([MEGATRON, MEGATRON.replace("20/", "30/")])["step"] == 30


# As 22.05 and, in its second job, later releases write them.
def slurm_job(path: object, **changes: object) -> dict:
    job = {
        "job_id": 7, "name": "pretrain", "user_name": "alice", "user_id": os.getuid(),
        "job_state": "RUNNING", "nodes": "n[1-2]", "node_count": 2, "start_time": 1000,
        "end_time": 9000, "time_limit": 90, "standard_output": str(path),
        "tres_alloc_str": "cpu=64,node=2,gres/gpu=16", "exit_code": 0,
    }  # fmt: skip
    return job | changes


@pytest.fixture
def slurm(monkeypatch):
    """Slurm's programs; each answers what the test stated."""
    told: dict[str, object] = {}

    def run(program, *_arguments, cwd=None):
        found = told[program]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(slurm_commands, "run", run)
    monkeypatch.setattr(slurm_commands, "_without_json", set())
    return told


def test_a_slurm_job_is_read_with_its_log_figures_and_address(slurm, tmp_path):
    log = tmp_path / "pretrain-7.out"
    log.write_text(f"{MEGATRON}\nINFO: Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C)\n")
    slurm["squeue"] = json.dumps({"jobs": [slurm_job(tmp_path / "%x-%j.out"), {"job_id": 8}]})
    (found,) = observe_slurm(SlurmConfig(), ["7"])
    assert (found.facts.state, found.facts.devices, found.has_ended) == ("RUNNING", 16, False)
    assert (found.started_at_ms, found.ended_at_ms, found.exit_code) == (1_000_000, None, None)
    assert (found.log_path, found.addresses) == (str(log), ("http://n1:8000",))
    assert found.figures["step_seconds"] == pytest.approx(1.1476)


def test_how_a_slurm_job_ended_is_told_in_each_releases_form(slurm, tmp_path):
    signal = {"id": {"set": True, "number": 9}}
    for code, expected in [
        (256, (1, None)),
        (9, (0, 9)),
        ({"return_code": {"set": True, "number": 3}, "signal": {"id": {"number": 0}}}, (3, None)),
        ({"return_code": {"set": False, "number": 0}, "signal": signal}, (None, 9)),
    ]:
        ended = slurm_job(tmp_path / "none", job_state=["FAILED"], exit_code=code)
        slurm["squeue"] = json.dumps({"jobs": [ended]})
        (found,) = observe_slurm(SlurmConfig(), ["7"])
        assert (found.exit_code, found.signal) == expected, code
        assert (found.has_ended, found.ended_at_ms) == (True, 9_000_000)
        assert found.facts.elapsed_seconds == 8000
        assert "No such file" in found.log_problem


def test_a_job_that_squeue_forgot_is_asked_of_accounting_and_ours_is_refused(slurm):
    slurm["squeue"] = SlurmError("slurm_load_jobs error: Invalid job id specified")
    slurm["sacct"] = SlurmError("accounting is disabled")
    slurm["scontrol"] = "JobId=7 JobName=a JobState=COMPLETED ExitCode=2:0 NodeList=n1"
    (found,) = observe_slurm(SlurmConfig(), ["7"])
    assert (found.has_ended, found.exit_code, found.facts.nodes) == (True, 2, "n1")
    slurm["scontrol"] = SlurmError("Invalid job id specified")
    assert "no job 7" in observe_slurm(SlurmConfig(), ["7"])[0].problem
    assert "no id of a Slurm job" in observe_slurm(SlurmConfig(), ["7;8"])[0].problem
    slurm["squeue"] = json.dumps({"jobs": [slurm_job("/x", name="slipway-a1")]})
    assert "Slipway's own" in observe_slurm(SlurmConfig(), ["7"])[0].problem


def test_only_a_plain_file_of_the_jobs_user_is_read(tmp_path):
    own = tmp_path / "out"
    own.write_text("".join(f"{each}\n" for each in range(500)))
    lines = read_tail(str(own), os.getuid())
    assert (lines[-1], len(lines)) == ("499", job_logs.MOST_LINES)
    (tmp_path / "link").symlink_to(own)
    os.mkfifo(tmp_path / "pipe")
    for path, user in [
        (own, os.getuid() + 1), (own, None), (tmp_path / "link", os.getuid()),
        (tmp_path / "pipe", os.getuid()), (tmp_path, os.getuid()), ("a\0b", os.getuid()),
    ]:  # fmt: skip
        with pytest.raises(LogUnreadableError):
            read_tail(str(path), user)


def test_a_pod_is_read_with_its_log_and_end_and_never_touched(cluster):  # noqa: F811
    config = KubernetesConfig.model_validate(PLAIN)
    gpu = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    pod = {
        "metadata": {"name": "serve-0", "namespace": "ml"},
        "spec": {"nodeName": "n1", "containers": [gpu]},
        "status": {"phase": "Running", "podIP": "10.0.0.9", "startTime": "2026-01-01T00:00:00Z"},
    }
    cluster.others = [pod]
    cluster.logs["serve-0"] = "Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)\n"
    (found,) = observe_pods(config, ["serve-0"])
    assert (found.facts.devices, found.addresses) == (8, ("http://10.0.0.9:8000",))
    terminated = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:01:00Z"}
    pod["status"] |= {
        "phase": "Failed",
        "containerStatuses": [{"state": {"terminated": terminated}}],
    }
    (ended,) = observe_pods(config, ["serve-0"])
    assert (ended.has_ended, ended.exit_code, ended.facts.detail) == (True, 137, "OOMKilled")
    assert (ended.facts.elapsed_seconds, ended.addresses) == (60, ())
    assert "no pod gone" in observe_pods(config, ["gone"])[0].problem
    assert "no name of a pod" in observe_pods(config, ["../secrets/a"])[0].problem
    pod["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "slipway"}
    assert {each.partition(" ")[0] for each in cluster.requests} == {"GET"}


def test_a_host_reports_what_is_new_until_the_site_has_it(slurm, tmp_path):
    jobs = [slurm_job(tmp_path / "o", job_id=each) for each in range(1, REPORTED_AT_ONCE + 3)]
    slurm["squeue"] = json.dumps({"jobs": jobs})
    observed = ObservedJobs(HostConfig.model_validate({"slurm": {}}))
    assert (observed.step(), observed.news()) == (3600.0, ())
    names = [str(each["job_id"]) for each in jobs]
    assert (observed.obey(names), observed.obey(names)) == (True, False)
    observed.step()
    first = observed.news()
    assert observed.news() == first  # it was not sent
    observed.mark_reported()
    rest = observed.news()
    assert sorted(each.job_id for each in (*first, *rest)) == sorted(names)
    observed.mark_reported()
    assert observed.news() == ()
    slurm["squeue"] = SlurmUnreachableError("Unable to contact slurm controller")
    observed.step()
    assert "Unable to contact" in observed.news()[0].problem
