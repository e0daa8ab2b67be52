"""Small files that are whole or absent, locks, and the space kept for the last word."""

import json
import os
import time

import pytest

from runners.supervision import record

END = {"exit_code": 1, "reason": "exit_nonzero", "last_lines": []}


def test_a_document_replaces_the_old_one_whole_or_leaves_it(tmp_path, monkeypatch):
    record.write_json(tmp_path / "x.json", {"a": 1})
    record.write_json(tmp_path / "x.json", {"b": 2})
    assert record.read_json(tmp_path / "x.json") == {"b": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]

    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    with pytest.raises(OSError, match="No space left"):
        record.write_json(tmp_path / "x.json", {"c": 3})
    assert record.read_json(tmp_path / "x.json") == {"b": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_damaged_or_absent_document_is_none(tmp_path):
    for damage in [b"", b"{", b"\0\0", b"[1]", b"\xff"]:
        (tmp_path / "x.json").write_bytes(damage)
        assert record.read_json(tmp_path / "x.json") is None, damage

    assert record.read_json(tmp_path / "absent.json") is None


def test_a_lock_is_held_by_one(tmp_path):
    with record.locked(tmp_path / "lock"):
        assert record.is_locked(tmp_path / "lock")
        with pytest.raises(record.LockedError, match="held by another"):
            with record.locked(tmp_path / "lock"):
                pass

    assert not record.is_locked(tmp_path / "lock")


def test_a_patient_waiter_gets_a_lock_that_is_freed_meanwhile(tmp_path):
    if pid := os.fork():
        os.waitpid(pid, 0)  # the grandchild below holds the lock by now
        with record.locked(tmp_path / "lock", patience_s=5.0):
            held = True
        assert held
        return
    with record.locked(tmp_path / "lock"):
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)


def test_the_exit_record_uses_the_space_kept_for_it(tmp_path):
    record.reserve_exit_slot(tmp_path)
    assert (tmp_path / "exit.slot").stat().st_size == record.SLOT_BYTES

    record.write_exit_record(tmp_path, END)

    assert json.loads((tmp_path / "exit.json").read_text()) == END
    assert not (tmp_path / "exit.slot").exists()


def test_an_exit_record_that_is_too_long_loses_its_oldest_lines(tmp_path):
    lines = [f"line {number} " + "\x01" * 100 for number in range(100)]

    written = record.write_exit_record(tmp_path, END | {"last_lines": lines})

    assert written["last_lines"][-1] == lines[-1]
    assert 0 < len(written["last_lines"]) < 100
    assert (tmp_path / "exit.json").stat().st_size <= record.SLOT_BYTES
