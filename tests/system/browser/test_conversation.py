"""A conversation with a deployment in a real browser, through the gateway to a waking model."""

import json
import shlex

import pytest

from tests.system.browser.driving import model_of

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_model_that_sleeps_is_woken_and_talked_to(visitors, stack, finished_job):
    """The demo's model has no chat template, which is known once it was loaded."""
    model = model_of(stack, finished_job)
    with visitors.page() as page:
        page.goto(f"{stack.base_url}/plans/new/?preset=endpoint&model={model}")
        page.goto(page.url.rpartition("/edit/")[0] + "/edit/review/")
        page.locator("#id_deploy_name").fill("talker")
        page.locator("button[name='run'][value='deployment']").click()
        page.get_by_role("heading", name="talker").wait_for()
        page.get_by_role("link", name="Playground").click()
        prompt, turns = page.locator("#id_prompt"), page.locator("[data-turns] li")
        page.locator("#id_max_tokens").fill("12")
        page.locator("#id_system").fill("It's short.")
        prompt.fill("import")
        prompt.press("Control+Enter")
        page.get_by_text("first token after").wait_for()
        assert turns.count() == 2
        assert "12 tokens" in turns.nth(1).inner_text()
        assert turns.nth(1).locator("pre").inner_text()
        page.get_by_text("no chat template: your text is continued").wait_for()
        prompt.fill("it's")
        with page.expect_request("**/v1/completions") as sent:
            page.locator("[data-send]").click()
        assert sent.value.post_data_json["prompt"] == "it's"
        page.get_by_text("first token after").nth(1).wait_for()
        page.get_by_text("This conversation as code").click()
        python = page.locator("#conversation-python").inner_text()
        curl = page.locator("#conversation-curl").inner_text()
        page.route("**/v1/completions", lambda _route: None, times=1)  # no answer before Stop
        prompt.fill("def")
        page.locator("[data-send]").click()
        page.locator("[data-stop]").click()
        turns.nth(5).get_by_text("stopped").wait_for()
        prompt.fill("x" * 30_000)  # more than the model's context
        page.locator("[data-send]").click()
        turns.last.get_by_text("context").wait_for()
        assert prompt.input_value() == "x" * 30_000  # nothing is lost
        page.get_by_role("button", name="New conversation").click()
        assert turns.count() == 0
        page.reload()
        assert page.get_by_text("no chat template: your text is continued").is_visible()
        assert page.evaluate("window.broken") == []
    compile(python, "python", "exec")
    assert "client.completions.create(" in python
    body = json.loads(shlex.split(curl.replace("\\\n", " "))[-1])
    assert (body["prompt"], body["model"], body["max_tokens"]) == ("it's", "talker", 12)
