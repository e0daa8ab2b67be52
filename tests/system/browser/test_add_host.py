"""Adding a host by hand: the form, the command, the check-list that ticks by itself."""

import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from tests.stack import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def added(new_page, stack, tmp_path):
    """The check page of a host whose command was run; this machine has been measured before."""
    page = new_page("olga")
    page.goto(f"{stack.base_url}/hosts/add/")
    page.get_by_label("Name").fill("Second box")
    page.get_by_role("button", name="Create the command").click()
    command = page.inner_text("#enroll-command")
    token = re.search(r"--token (\S+)", command)[1]
    stack.run("-m", "runners", "enroll", "--server", stack.base_url, "--token", token,
              "--dir", str(tmp_path))  # fmt: skip
    stack.take_measurement()
    agent = subprocess.Popen(
        [sys.executable, "-m", "runners", "work", "--dir", str(tmp_path)],
        cwd=ROOT, env=stack.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield page
    agent.terminate()
    agent.wait(60)


def test_the_check_list_ticks_until_the_host_is_ready(added):
    expect(added.get_by_role("heading", level=1)).to_contain_text("Ready", timeout=600_000)
    expect(added.locator(".checklist li.good")).to_have_count(9, timeout=600_000)
    expect(added.get_by_text(re.compile(r"\d+ ms, signed, round trip"))).to_be_visible()
    expect(added.get_by_role("link", name=re.compile("Run the demo on"))).to_be_visible()
