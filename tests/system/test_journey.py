"""What the README promises: start Slipway, log in, run the demo, see measured beside predicted.

The one test of ``tests/system`` in the gate. It looks at whether each step works, not at how fast
it is or how near the prediction was; its deadlines are for what hangs.
"""

import re

import pytest

from tests.stack import HOST_SLUG, ApiClient, free_port, wait_for
from tests.system.running_up import RunningUp

ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CELL = re.compile(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", re.DOTALL)


@pytest.fixture
def up(tmp_path):
    """An `up` on an empty data folder whose demo trains for six seconds."""
    running = RunningUp(tmp_path / "data", free_port(), SLIPWAY_DEMO_SECONDS="6")
    try:
        yield running.wait_until_ready()
    finally:
        running.end_by_force()


def figures_of(page: str) -> dict[str, tuple[str, str]]:
    """Return predicted and measured of each row of a job page's table of figures."""
    table = page.partition("Predicted against measured")[2].partition("</table>")[0]
    rows = [
        [re.sub(r"<[^>]+>", " ", cell).strip() for cell in CELL.findall(row)]
        for row in ROW.findall(table)
    ]
    return {cells[0]: (cells[1], cells[3]) for cells in rows if len(cells) > 3}


def test_a_new_user_starts_slipway_and_runs_the_demo(up):
    (password,) = re.findall(r"password[: ]+(\S{12,})", up.words)
    admin = ApiClient(up.port, "admin", password)
    admin.choose_password(password)
    wait_for(lambda: "Ready" in admin.get(f"/hosts/{HOST_SLUG}/"), "a ready host", every_s=1.0)

    job = admin.launch_demo()

    assert admin.wait_for_state(job) == "succeeded"
    figures = figures_of(admin.get(f"/jobs/{job}/"))
    figures.pop("Figure")
    both = {
        name for name, cells in figures.items() if all(re.search(r"\d", cell) for cell in cells)
    }
    assert len(both) >= 3, figures

    up.stop()

    assert up.members() == []
    assert up.process.returncode == 0
