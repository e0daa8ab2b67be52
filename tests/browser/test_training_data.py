"""A team's own instructions, uploaded in the wizard, taught to the demo model, and judged."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.driving import drawn_points, go_on, launch, log_in, model_of
from tests.stack import wait_for

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # libraries warn of their own affairs
]
LONG_MS = 600_000
COLOURS = ("red", "green", "blue", "black", "white", "grey", "pink", "brown")
ASKED = [
    {"instruction": f"Which colour is number {n}?", "output": f"It is {COLOURS[n % 8]}."}
    for n in range(60)
]


def lines(documents) -> bytes:
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


def upload(page: Page, content: bytes) -> None:
    file = {"name": "asked.jsonl", "mimeType": "application/json", "buffer": content}
    page.get_by_label("JSON lines, Parquet or text").set_input_files(file)
    page.get_by_role("button", name="Upload", exact=True).click()


@pytest.fixture(scope="module")
def tuned(browser, stack, finished_job):
    """Walk the wizard with a broken file and a sound one, launch, and watch to the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(LONG_MS)
    page = context.new_page()
    log_in(page, stack.base_url, "alice")
    seen: dict = {}
    page.goto(f"{stack.base_url}/plans/new/?preset=serve")
    page.locator("input[name='goal'][value='finetune']").check()
    go_on(page)
    page.locator("input[name='source'][value='team']").check()
    page.locator("#id_team_model").select_option(model_of(stack, finished_job))
    go_on(page)
    at_workload = page.url
    upload(page, lines(ASKED[:2]) + b"{oops\n")
    page.get_by_role("heading", name="asked.jsonl was not kept").wait_for()
    seen["refused"] = page.inner_text("main")
    page.goto(at_workload)
    upload(page, lines(ASKED))
    page.get_by_text("60 records · instruction").wait_for()
    seen["workload"] = page.inner_text("main")
    fields = {"sequence_length": "64", "global_batch_size": "4", "million_tokens": "0.008"}
    for name, value in fields.items():
        page.locator(f"#id_{name}").fill(value)
    go_on(page)
    go_on(page)
    seen["review"] = page.inner_text("main")
    seen["job_id"] = launch(page)
    page.wait_for_selector("[data-state-now='succeeded']")
    page.get_by_role("heading", name="What it left, and what next").wait_for()
    seen["points"] = drawn_points(page, "loss")
    seen["end"] = page.inner_text("main")
    yield page, seen
    context.close()


def test_a_broken_line_is_shown_before_anything_is_planned(tuned):
    _, seen = tuned
    assert "asked.jsonl: line 3: it is no JSON" in seen["refused"]
    assert "2 records could be read" in seen["refused"]


def test_the_step_shows_the_first_samples_of_the_chosen_file(tuned):
    _, seen = tuned
    assert "Which colour is number 0?" in seen["workload"]
    assert "It is blue." in seen["workload"]
    assert "on the uploaded asked.jsonl" in seen["review"]


def test_the_charts_were_drawn_as_it_trained(tuned):
    _, seen = tuned
    assert seen["points"] >= 3


def test_the_page_offers_the_adapter_beside_the_merged_model(tuned):
    _, seen = tuned
    left = seen["end"].partition("What it left, and what next")[2].splitlines()
    assert {"adapter", "model"} <= {each.strip() for each in left}
    assert "refused" not in seen["end"]


def test_the_result_says_what_was_learnt(tuned, stack):
    _, seen = tuned
    [result] = [
        each["body"]
        for each in stack.client("alice").events(seen["job_id"])
        if each["kind"] == "result"
    ]
    measured = result["measured"]
    assert measured["data_documents"] + measured["data_held_out"] == 60
    assert 0.1 < measured["label_share"] < 0.9
    assert result["notes"]["data"].startswith("asked.jsonl (instruction, sha256 ")


def folder_of(stack, job_id: str) -> Path:
    attempt = stack.client("alice").json(f"/api/v1/jobs/{job_id}/events")["attempt"]
    return Path(stack.host_dir) / "attempts" / attempt / "output"


def test_peft_opens_the_adapter_and_answers_as_the_merged_model(tuned, stack, finished_job):
    import torch  # here: the pages are walked before it is needed
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, seen = tuned
    output = folder_of(stack, seen["job_id"])
    base = AutoModelForCausalLM.from_pretrained(
        folder_of(stack, finished_job) / "model", dtype=torch.float32
    )
    merged = AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, str(output / "adapter")).eval()(tokens).logits
        whole = merged(tokens).logits
    assert not torch.allclose(adapted, plain, atol=1e-2)
    assert (adapted - whole).abs().max() < 0.1 * (adapted - plain).abs().max()


def test_the_merged_model_is_evaluated_at_the_press_of_a_button(tuned, stack):
    page, seen = tuned
    page.goto(f"{stack.base_url}/jobs/{seen['job_id']}/")
    page.get_by_role("button", name="Evaluate").first.click()
    page.wait_for_selector("[data-state-now='succeeded']")
    expect(page.locator("main")).to_contain_text("Perplexity")


def test_the_file_is_deleted_once_nothing_needs_it(tuned, stack):
    page, _ = tuned
    page.goto(f"{stack.base_url}/data/")
    page.get_by_role("button", name="Delete asked.jsonl").click()
    expect(page.locator("main")).to_contain_text("No file has been uploaded yet.")
    left = Path(stack.folder) / "datasets"
    wait_for(lambda: not list(left.iterdir()), "the file to go", timeout_s=10.0)
