"""A rank that torchrun starts again repeats the words of an end that would come again."""

import pytest
import torch

from runners.jobs import runtime
from runners.jobs.runtime import BadInputError, MissingModelError, run_job
from runners.jobs.train.guard import DivergedError
from tests.runners.jobs.tiny import tiny_training


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BadInputError("4 ranks, 2 started"), "BAD_INPUT: 4 ranks, 2 started"),
        (MissingModelError("no /m"), "MODEL_OR_DATA_MISSING: no /m"),
        (DivergedError("loss nan"), "runners.jobs.train.guard.DivergedError: loss nan"),
        (torch.OutOfMemoryError("CUDA out of memory"), "torch.OutOfMemoryError: CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "builtins.RuntimeError: Def"),
    ],
)  # fmt: skip
def test_what_would_end_every_rank_is_said_again_and_not_done_again(
    error, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(runtime.COUNT_VARIABLE, "0")
    runtime.note_end(tmp_path, error)
    runtime.end_as_before(tmp_path, 3)  # a first start looks at no note

    monkeypatch.setenv(runtime.COUNT_VARIABLE, "1")
    with pytest.raises(SystemExit) as ended:
        runtime.end_as_before(tmp_path, 3)

    assert ended.value.code == 3
    assert capsys.readouterr().err.startswith(said)


def test_a_rank_that_lost_another_or_broke_by_itself_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv(runtime.COUNT_VARIABLE, "0")
    runtime.note_end(tmp_path, RuntimeError("Connection closed by peer"))
    monkeypatch.setenv(runtime.COUNT_VARIABLE, "1")

    runtime.end_as_before(tmp_path, 3)

    assert list(tmp_path.iterdir()) == []


def test_a_job_that_torchrun_did_not_start_leaves_no_note(tmp_path, monkeypatch):
    monkeypatch.delenv(runtime.COUNT_VARIABLE, raising=False)

    runtime.note_end(tmp_path, BadInputError("4 ranks, 2 started"))
    runtime.end_as_before(tmp_path, 3)

    assert list(tmp_path.iterdir()) == []


def test_a_job_that_cannot_run_as_asked_does_its_work_once(host, monkeypatch, capsys):
    folder, done = host.attempt("asked-wrongly", tiny_training()), []
    monkeypatch.setattr("sys.argv", ["train", str(folder)])

    def work(_job: object) -> None:
        done.append(1)
        raise BadInputError("ask otherwise")

    for count in ("0", "1", "2"):
        monkeypatch.setenv(runtime.COUNT_VARIABLE, count)
        with pytest.raises(SystemExit):
            run_job("train", work)

    assert done == [1]
    assert capsys.readouterr().err == "BAD_INPUT: ask otherwise\n" * 3
