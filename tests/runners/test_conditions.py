"""How the machine was at the end: read from files that any of may be hidden."""

import time

import pytest

from runners.messages import EndConditions
from runners.supervision import classification

# Records of /dev/kmsg: level, number, microseconds since boot, flags; text (kernel, dev-kmsg).
XID = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus."
LOG = f"""6,1200,5000000,-;usb 1-1: new device
4,1201,90000000,-;{XID}
 SUBSYSTEM=pci
4,1202,120000000,-;NVRM: Xid (PCI:0000:44:00): 48, pid=4242, Double Bit ECC Error
"""


def test_this_machines_conditions_are_what_the_wire_carries(tmp_path):
    found = EndConditions.model_validate(classification.read(tmp_path, time.monotonic()))

    assert found.memory_available_bytes > 2**20
    assert found.disk_free_bytes > 2**20
    assert found.load >= 0


def test_the_drivers_reports_since_the_start_are_kept(tmp_path):
    (tmp_path / "kmsg").write_text(LOG)

    found = list(classification.xids(tmp_path / "kmsg", since_monotonic_s=60.0))

    assert found == [
        "Xid 79 on PCI:0000:44:00: GPU has fallen off the bus.",
        "Xid 48 on PCI:0000:44:00: pid=4242, Double Bit ECC Error",
    ]


def test_reports_from_before_the_start_are_not_this_attempts(tmp_path):
    (tmp_path / "kmsg").write_text(LOG)

    assert len(list(classification.xids(tmp_path / "kmsg", since_monotonic_s=100.0))) == 1


def test_a_hidden_kernel_log_is_no_report(tmp_path):
    assert list(classification.xids(tmp_path / "absent", 0.0)) == []


@pytest.mark.parametrize("text", ["", "no record", "4,1;NVRM: Xid (x): 1, y", "\x00\xff"])
def test_a_damaged_kernel_log_is_no_report(tmp_path, text):
    (tmp_path / "kmsg").write_text(text, encoding="latin-1")

    assert list(classification.xids(tmp_path / "kmsg", 0.0)) == []


def test_the_hottest_sensor_is_told(tmp_path):
    for number, milli_degrees in enumerate((41_000, 67_500)):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "temp").write_text(f"{milli_degrees}\n")

    assert classification._hottest(tmp_path) == 67.5


def test_a_machine_without_sensors_tells_no_heat(tmp_path):
    assert classification._hottest(tmp_path) is None
