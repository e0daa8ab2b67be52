"""A team's own instructions, uploaded in the wizard, taught to the demo model, and judged."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.stack import wait_for

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # libraries warn of their own affairs
]


def test_a_broken_line_is_shown_before_anything_is_planned(tuned):
    assert "asked.jsonl: line 3: it is not valid JSON" in tuned["refused"]
    assert "2 records could be read" in tuned["refused"]


def test_the_step_shows_the_first_samples_of_the_chosen_file(tuned):
    assert "Which colour is number 0?" in tuned["workload"]
    assert "It is blue." in tuned["workload"]
    assert "on the uploaded asked.jsonl" in tuned["review"]


def test_the_charts_were_drawn_as_it_trained(tuned):
    assert tuned["points"] >= 3


def test_the_page_offers_the_adapter_beside_the_merged_model(tuned):
    left = tuned["end"].rpartition("Artefacts")[2].splitlines()
    assert {"adapter", "model"} <= {each.strip() for each in left}
    assert "refused" not in tuned["end"]


def test_the_result_says_what_was_learnt(tuned, stack):
    [result] = [
        each["body"]
        for each in stack.client("alice").events(tuned["job_id"])
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

    output = folder_of(stack, tuned["job_id"])
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


def test_the_merged_model_is_evaluated_at_the_press_of_a_button(tuned, page, stack):
    page.goto(f"{stack.base_url}/jobs/{tuned['job_id']}/")
    page.get_by_role("button", name="Evaluate").first.click()
    page.wait_for_selector("[data-state-now='succeeded']")
    expect(page.locator("main")).to_contain_text("Perplexity")


def test_the_file_is_deleted_once_nothing_needs_it(tuned, page, stack):
    page.goto(f"{stack.base_url}/data/")
    page.get_by_role("button", name="Delete asked.jsonl").click()
    expect(page.locator("main")).to_contain_text("No file has been uploaded yet.")
    left = Path(stack.folder) / "datasets"
    wait_for(lambda: not list(left.iterdir()), "the file to go", timeout_s=10.0)
