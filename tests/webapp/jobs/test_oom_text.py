"""The figures in what allocators wrote; each text is a recorded one."""

import pytest

from tests.runners.test_classification import DEVICE, MAIN
from webapp.jobs.memory_terms import OutOfMemoryFigures, read_oom

GIB, MIB = 2**30, 2**20


def test_all_of_torchs_figures_are_read():
    said = read_oom([DEVICE["torch"]])

    assert said == OutOfMemoryFigures(
        asked=int(22.78 * GIB),
        capacity=int(31.47 * GIB),
        free=int(12.73 * GIB),
        in_use=int(18.73 * GIB),
        unallocated=int(9.35 * GIB),
    )


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (DEVICE["torch before 2.5"], int(55.57 * GIB)),
        (DEVICE["torch 1"], 264 * MIB),
        (DEVICE["llama.cpp"], 144 * MIB),
        (MAIN["torch"], 132426121216),
        (MAIN["torch elsewhere"], 1981808640),
        (MAIN["rust"], 4456464),
        (DEVICE["vllm"], None),
    ],
)
def test_what_the_last_allocation_wanted_is_read(text, asked):
    assert read_oom(text.splitlines()).asked == asked


def test_a_misspelt_capacity_of_older_versions_is_read():
    assert read_oom([DEVICE["torch before 2.5"]]).capacity == 12 * GIB


def test_of_several_messages_the_last_one_counts():
    lines = ["Tried to allocate 1.00 GiB", "freed something", "Tried to allocate 2.00 GiB"]

    assert read_oom(lines).asked == 2 * GIB


def test_lines_without_figures_say_nothing():
    assert read_oom(["Traceback (most recent call last):"]) == OutOfMemoryFigures()
