"""How every job process begins and ends: its folder, its threads, its exit code."""

import os
import sys

import pytest

from runners.jobs.runtime import BadInputError, num_threads, open_job, run_job
from runners.jobspec import BenchmarkSpec
from tests.runners.jobs.tiny import TINY, tiny_training


def test_the_spec_is_read_from_the_attempt_folder(host):
    folder = host.attempt("read", tiny_training(max_steps=3))

    assert open_job(folder, "train").spec == tiny_training(max_steps=3)


def test_the_host_folder_comes_from_the_environment(host, monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPWAY_HOST_DIR", str(tmp_path))

    assert open_job(host.attempt("env", tiny_training()), "train").host_dir == tmp_path


def test_without_the_variable_the_host_folder_is_two_above(host, monkeypatch):
    monkeypatch.delenv("SLIPWAY_HOST_DIR", raising=False)

    assert (
        open_job(host.attempt("above", tiny_training()), "train").host_dir == host.path.resolve()
    )


def test_a_spec_of_another_kind_is_refused(host):
    folder = host.attempt("other", BenchmarkSpec(model=TINY))

    with pytest.raises(BadInputError, match="kind 'benchmark', this is 'train'"):
        open_job(folder, "train")


def test_a_folder_without_a_spec_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"cannot read .*spec\.json"):
        open_job(tmp_path, "train")


def test_a_damaged_spec_is_refused_by_its_field(tmp_path):
    (tmp_path / "spec.json").write_text('{"attempt_id": "a"}')

    with pytest.raises(BadInputError, match="job_id: Field required"):
        open_job(tmp_path, "train")


@pytest.mark.parametrize(
    ("configured", "expected"),
    [("3", 3), ("", None), ("many", None), ("0", None)],
)
def test_threads_follow_the_environment_or_else_the_cores(monkeypatch, configured, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", configured)

    assert num_threads() == (expected or len(os.sched_getaffinity(0)))


def test_a_missing_argument_ends_with_usage_and_exit_3(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark"])

    with pytest.raises(SystemExit) as ended:
        run_job("benchmark", lambda _job: None)

    assert ended.value.code == 3
    assert capsys.readouterr().err == (
        "BAD_INPUT: usage: python -m runners.jobs.benchmark ATTEMPT_DIR\n"
    )


def test_importing_the_package_puts_the_libraries_offline():
    import runners.jobs  # noqa: F401 - its import is what is tested

    assert os.environ["HF_HUB_OFFLINE"] == "1"
