"""A smaller model guesses ahead, chosen on the review page: the text stays plain greedy's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from runners.jobs.loading import load_folder, load_tokenizer
from tests.browser.driving import go_on, launch, log_in, model_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # libraries warn of their own affairs
]
LONG_MS = 600_000
TEXTS = ["import os", "def read(path):", "class Reader:", "return None"]
ASKED = {
    "batch_size": 2, "input_tokens": 16, "output_tokens": 24, "prompts_path": "asked.txt",
}  # fmt: skip


def output_of(host_dir: Path, job_id: str) -> Path:
    """Return what the only attempt of a job left on the host."""
    for spec in host_dir.glob("attempts/*/spec.json"):
        if json.loads(spec.read_text())["job_id"] == job_id:
            return spec.parent / "output"
    raise AssertionError(f"no attempt of {job_id} below {host_dir}")


@pytest.fixture(scope="module")
def guessed(browser, stack, finished_job):
    """Train a second model, let the first guess for it from wizard to end; note what was seen."""
    client = stack.client("alice")
    trained = client.launch_demo()
    client.wait_for_state(trained, "succeeded")
    (stack.host_dir / "models" / "asked.txt").write_text("\n".join(TEXTS))
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(LONG_MS / 3)
    page = context.new_page()
    log_in(page, stack.base_url, "alice")
    page.goto(f"{stack.base_url}/plans/new/?preset=generate&model={model_of(stack, trained)}")
    page.goto(re.sub("/edit/.*", "/edit/workload/", page.url))
    for name, value in ASKED.items():
        page.locator(f"#id_{name}").fill(str(value))
    go_on(page)
    page.get_by_text("Pin parts of the strategy").click()
    page.locator("#id_pin-weight_dtype").select_option("fp32")
    go_on(page)
    page.get_by_label("Guess ahead with").select_option(model_of(stack, finished_job))
    job_id = launch(page)
    page.wait_for_selector("[data-state-now='succeeded']", timeout=LONG_MS)
    page.get_by_text("Guesses that were right").first.wait_for()
    yield {"page": page.inner_text("main"), "job": job_id, "trained": trained}
    context.close()


def greedy_texts(folder: Path, lines: list[dict[str, Any]]) -> list[str]:
    """Return what transformers' own generate writes after each prompt alone."""
    model, tokenizer = load_folder(folder, "fp32", torch.device("cpu")), load_tokenizer(folder)
    found = []
    for line in lines:
        asked = tokenizer(line["prompt"], return_tensors="pt")
        ids = model.generate(**asked, max_new_tokens=line["output_tokens"], do_sample=False)
        answer = ids[0, asked["input_ids"].shape[1] :]
        found.append(tokenizer.decode(answer, skip_special_tokens=True))
    return found


def test_the_text_of_a_guessed_generation_is_plain_greedys(guessed, stack):
    path = output_of(stack.host_dir, guessed["job"]) / "outputs" / "outputs.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    folder = output_of(stack.host_dir, guessed["trained"]) / "model"

    assert [line["prompt"] for line in lines] == TEXTS
    assert [line["text"] for line in lines] == greedy_texts(folder, lines)


def test_the_job_was_told_of_the_guessing_model_and_says_how_often_it_was_right(guessed, stack):
    spec = json.loads((output_of(stack.host_dir, guessed["job"]).parent / "spec.json").read_text())
    speculation = spec["spec"]["speculation"]
    attempt = output_of(stack.host_dir, guessed["trained"]).parent.name

    assert speculation["model"]["attempt_id"] != attempt
    assert spec["spec"]["model"]["attempt_id"] == attempt
    assert re.search(r"guesses that were right\s+[\d.]+", guessed["page"].lower())
