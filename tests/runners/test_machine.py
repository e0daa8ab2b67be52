"""Which machine this is: the same for every user and after every boot, and not its own name."""

import os

import pytest

from runners import inventory
from runners.machine import machine_id

RAW = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def said(tmp_path):
    """Return a function that says which machine one with this identifier is."""

    def say(text: str) -> str | None:
        path = tmp_path / "machine-id"
        path.write_text(text)
        return machine_id(path)

    return say


def test_it_is_the_same_each_time_and_another_on_another_machine(said):
    assert said(f"{RAW}\n") == said(RAW)
    assert said(RAW) != said(RAW[::-1])


def test_the_machines_own_identifier_does_not_leave_it(said):
    found = said(RAW)
    assert len(found) == 64
    assert RAW not in found
    assert bytes.fromhex(RAW) not in bytes.fromhex(found)


@pytest.mark.parametrize("text", ["", "uninitialized\n", "0" * 32, "zz" * 16, RAW + "00"])
def test_what_is_no_identifier_says_nothing(said, text):
    assert said(text) is None


def test_a_container_without_one_says_nothing(tmp_path):
    assert machine_id(tmp_path / "not-there") is None


def test_the_facts_tell_machine_and_user(tmp_path):
    facts = inventory.host_facts(tmp_path)
    assert facts.machine_id == machine_id()
    assert facts.user_id == os.getuid()
