"""The unit file: unprivileged, shut in, and no job dies with the agent."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from runners.__main__ import main
from runners.commands import render

HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "PrivateTmp": "yes",
    "KillMode": "process",
    "OOMPolicy": "continue",
    "Delegate": "yes",
    "UMask": "0077",
    "Restart": "always",
}


def parsed(text: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    return unit


@pytest.mark.parametrize("user", [None, "slipway"])
def test_the_unit_is_hardened(user):
    service = parsed(render(Path("/home/u/.slipway/host"), user=user))["Service"]

    assert {name: service[name] for name in HARDENED} == HARDENED
    assert service["ReadWritePaths"] == "/home/u/.slipway/host"


def test_the_gpus_stay_visible():
    assert "PrivateDevices" not in render(Path("/h"))


def test_a_systems_unit_names_its_user_and_a_users_own_does_not():
    system, own = render(Path("/h"), user="slipway"), render(Path("/h"))

    assert parsed(system)["Service"]["User"] == "slipway"
    assert parsed(system)["Install"]["WantedBy"] == "multi-user.target"
    assert "User=" not in own
    assert parsed(own)["Install"]["WantedBy"] == "default.target"


def test_a_folder_with_spaces_and_percent_signs_means_itself():
    service = parsed(render(Path("/home/u/100 %/host"), python="/usr/bin/python3"))["Service"]

    assert service["ReadWritePaths"] == '"/home/u/100 %%/host"'
    assert service["ExecStart"].endswith('--dir "/home/u/100 %%/host"')


def test_the_command_prints_the_unit_of_its_folder(host_dir, capsys):
    assert main(["unit", "--dir", str(host_dir.path), "--system", "slipway"]) == 0

    printed = capsys.readouterr().out
    assert printed == render(host_dir.path, user="slipway")


def test_systemd_finds_nothing_to_say_about_it(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    unit = tmp_path / "slipway-host.service"
    unit.write_text(render(tmp_path, python="/bin/true", user="root"))

    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )

    assert "slipway-host" not in told.stderr
