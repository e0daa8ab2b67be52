"""A conversation with a deployment in a real browser, through the gateway to a waking model."""

import json
import subprocess
import sys

import pytest

from tests.system.browser.driving import model_of

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_model_that_sleeps_is_woken_and_talked_to(visitors, stack, finished_job):
    model = model_of(stack, finished_job)
    with visitors.page() as page:
        page.goto(f"{stack.base_url}/plans/new/?preset=serve&model={model}")
        page.goto(page.url.rpartition("/edit/")[0] + "/edit/review/")
        page.locator("#id_deploy_name").fill("talker")
        page.locator("button[name='run'][value='deployment']").click()
        page.get_by_role("heading", name="talker").wait_for()
        page.get_by_role("link", name="Playground").click()
        page.locator("#id_max_tokens").fill("12")
        page.locator("#id_system").fill("It's short.")
        page.locator("#id_prompt").fill("import")
        page.locator("#id_prompt").press("Control+Enter")
        page.get_by_text("first token after").wait_for()
        turns = page.locator("[data-turns] li")
        assert turns.count() == 2
        assert "12 tokens" in turns.nth(1).inner_text()
        answer = turns.nth(1).locator("pre").inner_text()
        assert answer
        page.locator("#id_prompt").fill("os")
        page.locator("[data-send]").click()
        page.get_by_text("first token after").nth(1).wait_for()
        page.get_by_text("This conversation as code").click()
        written = page.locator("#conversation-python").inner_text()
        shown = page.locator("#conversation-curl").inner_text()
        page.locator("#id_prompt").fill("x" * 9000)  # more than the model's context
        page.locator("[data-send]").click()
        page.get_by_text("maximum context length").or_(
            page.get_by_text("context")
        ).first.wait_for()
        assert page.locator("#id_prompt").input_value() == "x" * 9000  # nothing is lost
        page.get_by_role("button", name="New conversation").click()
        assert turns.count() == 0
    compile(written, "written", "exec")
    body = subprocess.run(
        [sys.executable, "-c", "import shlex, sys; print(shlex.split(sys.stdin.read())[-1])"],
        input=shown.replace("\\\n", " "), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    roles = [each["role"] for each in json.loads(body)["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
