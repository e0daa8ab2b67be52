"""systemd's own verdict on the units of a server for a team."""

import shutil
import subprocess
import sys

import pytest

from tests.webapp.deploy.test_files import UNITS

pytestmark = pytest.mark.slow
MOST_EXPOSED = 20  # tenths of systemd's exposure level: 2.0 of 10


def test_systemd_takes_every_unit_and_finds_little_exposed(tmp_path):
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not here")
    places = [*UNITS, UNITS[0].with_name("slipway.target")]
    for path in places:  # with a Python that is there
        text = path.read_text().replace("/opt/slipway/.venv/bin/python", sys.executable)
        tmp_path.joinpath(path.name).write_text(text)
    copies = [str(tmp_path / path.name) for path in places]
    verified = subprocess.run(
        [analyze, "verify", "--man=no", *copies], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    for each in copies[:-1]:
        rating = ["security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", each]
        rated = subprocess.run([analyze, *rating], capture_output=True, text=True, check=False)
        assert rated.returncode == 0, rated.stdout[-200:]
