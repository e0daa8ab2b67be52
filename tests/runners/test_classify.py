"""Why an attempt ended: one code for each cause, first match wins."""

import signal

import pytest

from runners.reasons import Reason
from runners.supervision.classification import Ending, classify


def test_a_clean_exit_is_ok_whatever_it_said():
    assert classify(Ending(0, None, "warning: CUDA out of memory was caught")) is Reason.OK


def test_a_stop_explains_any_end():
    ending = Ending(None, signal.SIGKILL, "No space left", Reason.STOPPED_BY_USER)

    assert classify(ending) is Reason.STOPPED_BY_USER


def test_a_program_that_cannot_be_executed_is_our_fault():
    assert classify(Ending(None, None, "", is_exec_failure=True)) is Reason.ENGINE_START_FAILED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried", Reason.OOM_GPU),
        ("OSError: [Errno 28] No space left on device", Reason.DISK_FULL),
        ("x\nMODEL_OR_DATA_MISSING: no model in /m\n", Reason.MODEL_OR_DATA_MISSING),
        ("x\nBAD_INPUT: m.safetensors is cut off; copy it again\n", Reason.BAD_INPUT),
        ("x\nDISK_FULL: No space left on device: 0 bytes\n", Reason.DISK_FULL),
        ("he said BAD_INPUT: or so", Reason.EXIT_NONZERO),
        ("Traceback ...\nValueError: no", Reason.EXIT_NONZERO),
    ],
)
def test_the_last_words_of_a_failed_job_name_the_cause(text, reason):
    assert classify(Ending(1, None, text)) is reason


def test_a_kill_counts_as_memory_only_when_the_kernel_counted_one():
    killed = Ending(None, signal.SIGKILL, "")

    assert classify(killed) is Reason.KILLED_EXTERNALLY
    assert classify(killed._replace(has_oom_kill=True)) is Reason.OOM_HOST


def test_another_signal_is_the_jobs_own():
    assert classify(Ending(None, signal.SIGSEGV, "")) is Reason.SIGNAL


REPORT = """RANK_LOST: rank 0 of 2: Connection closed by peer
============================================================
runners.jobs.train FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : north
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
"""


def test_a_killed_rank_counts_as_killed_and_not_as_lost_by_the_others():
    killed = Ending(1, None, REPORT.format(code=-9))

    assert classify(killed) is Reason.KILLED_EXTERNALLY
    assert classify(killed._replace(has_oom_kill=True)) is Reason.OOM_HOST
    assert classify(killed._replace(last_text=REPORT.format(code=1))) is Reason.RANK_LOST
    told = f"x\nDISK_FULL: no space\n{killed.last_text}"
    assert classify(killed._replace(last_text=told)) is Reason.DISK_FULL
