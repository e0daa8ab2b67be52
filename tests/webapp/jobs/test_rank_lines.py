"""The last words of ranks told apart; what torchrun 2.13 really wrote when a rank failed."""

import pytest

from webapp.jobs.postmortem import first_failure, only_rank, split_by_rank

STEPS = ["[rank 0] step 1", "[rank 1] step 1"]
KILLED = """\
W1121 22:02:22.362000 31933 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 31938 closing signal SIGTERM
E1121 22:02:22.364000 31933 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 31939) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
train.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_22:02:22
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 31938)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 31938
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_22:02:22
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 31939)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 31939
=======================================================""".splitlines()
RAISED = [
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "train.py", line 9, in <module>',
    "[rank1]: ValueError: bad thing",
]


def test_lines_are_kept_by_the_rank_that_wrote_them():
    said = split_by_rank([*STEPS, *RAISED, "no number"])

    assert said.by_rank[0] == ["step 1"]
    assert said.by_rank[1][-1] == "ValueError: bad thing"
    assert said.by_rank[None] == ["no number"]


def test_a_host_with_one_rank_wrote_the_lines_without_a_number_too():
    said = split_by_rank(["[rank 2] step 1", "RANK_LOST: closed", *KILLED], is_one=True)

    assert (said.by_rank, said.report) == ({2: ["step 1", "RANK_LOST: closed"]}, KILLED)


def test_torchruns_own_report_is_kept_apart():
    said = split_by_rank([*STEPS, *KILLED])

    assert said.by_rank == {0: ["step 1"], 1: ["step 1"]}
    assert said.report == KILLED


def test_a_report_whose_beginning_was_cut_off_is_still_one():
    said = split_by_rank(KILLED[2:])

    assert (said.by_rank, said.report) == ({}, KILLED[2:])


def test_the_root_cause_is_the_rank_that_failed_first_not_the_one_that_was_asked_to_end():
    failure = first_failure([*STEPS, *KILLED])

    assert (failure.rank, failure.exit_code) == (1, -9)
    assert failure.record == {"exit_code": None, "signal": 9}


def test_an_exit_code_of_its_own_is_no_signal():
    lines = [line.replace(": -9 ", ": 1 ") for line in KILLED]

    assert first_failure(lines).record == {"exit_code": 1, "signal": None}


@pytest.mark.parametrize(
    "lines", [[], STEPS, KILLED[:-8], ["Root Cause (first observed failure):"]]
)
def test_without_a_whole_report_nobody_is_blamed(lines):
    assert first_failure(lines) is None


def test_a_host_with_one_rank_is_known_by_its_lines():
    assert only_rank(split_by_rank(["[rank 3] step 1", *KILLED[:1]])) == 3
    assert only_rank(split_by_rank(STEPS)) is None


def test_torchruns_banner_is_nobodys_last_word():
    banner = [
        "",
        "*" * 41,
        "Setting OMP_NUM_THREADS environment variable for each process to be 1",
    ]

    assert split_by_rank(banner).by_rank == {}
