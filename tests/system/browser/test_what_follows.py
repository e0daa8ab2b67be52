"""Tune, evaluate, compress and serve: chosen in the wizard, until the endpoint answers."""

import re
from typing import Any

import openai
import pytest

from tests.stack import wait_for
from tests.system.browser.driving import go_on, model_of
from tests.system.browser.walks import LONG_MS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # libraries warn of their own affairs
]
WORKFLOW_PATH = re.compile(r"/workflows/(\w+)/")
TUNING = {"sequence_length": "64", "global_batch_size": "4", "tokens": "0.004"}


def test_a_chain_from_the_wizard_ends_in_an_endpoint_that_answers(page, stack, finished_job):
    page.goto(f"{stack.base_url}/plans/new/?preset=serve")
    page.locator("input[name='goal'][value='finetune']").check()
    go_on(page)
    page.locator("input[name='source'][value='team']").check()
    page.locator("#id_team_model").select_option(model_of(stack, finished_job))
    go_on(page)
    for name, value in TUNING.items():
        page.locator(f"#id_{name}").fill(value)
    go_on(page)
    go_on(page)
    page.locator("#id_then_evaluate").check()
    page.locator("#id_then_compress").select_option("awq")
    page.get_by_text("Options of the compression").click()
    page.locator("#id_compress_group_size").fill("32")
    page.locator("#id_then_serve").select_option("slipway")
    page.get_by_text("Options of the endpoint").click()
    page.locator("#id_serve_idle_stop_seconds").fill("20")
    page.get_by_role("button", name="Launch with what follows").click()
    page.wait_for_url(WORKFLOW_PATH, timeout=LONG_MS)
    key = re.search(r"sk-slipway-[\w-]+", page.inner_text("main"))
    found = WORKFLOW_PATH.search(page.url)
    assert key is not None
    assert found is not None
    alice = stack.client("alice")

    def serving() -> dict[str, Any] | None:
        workflow = alice.json(f"/api/v1/workflows/{found[1]}")
        assert workflow["state"] == "running", workflow["steps"]
        job = workflow["steps"][3]["job"]
        return job and alice.json(f"/api/v1/jobs/{job}").get("endpoint")

    endpoint = wait_for(serving, "the endpoint", timeout_s=900, every_s=2)
    client = openai.OpenAI(base_url=endpoint["url"], api_key=key[0])
    model = client.models.list().data[0].id
    said = client.completions.create(model=model, prompt="import", max_tokens=4)
    assert said.usage.completion_tokens >= 1
    steps = alice.json(f"/api/v1/workflows/{found[1]}")["steps"]
    assert [each["state"] for each in steps[:3]] == ["succeeded"] * 3
    compressed = alice.json(f"/api/v1/jobs/{steps[2]['job']}")["spec"]
    assert (compressed["method"], compressed["group_size"]) == ("awq", 32)
    page.reload()
    page.get_by_text("Stop…", exact=True).click()
    page.get_by_role("button", name="Stop this workflow").click()
