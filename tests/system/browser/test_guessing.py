"""A smaller model guesses ahead, chosen on the review page: the text stays plain greedy's."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.browser.driving import go_on, launch, model_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # libraries warn of their own affairs
]
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
def guessed(visitors, stack, finished_job, tuned):
    """Let the first model guess for the tuned one from wizard to end; note what was seen."""
    (stack.host_dir / "models" / "asked.txt").write_text("\n".join(TEXTS))
    with visitors.page() as page:
        trained = model_of(stack, tuned["job_id"])
        page.goto(f"{stack.base_url}/plans/new/?preset=generate&model={trained}")
        page.goto(re.sub("/edit/.*", "/edit/workload/", page.url))
        for name, value in ASKED.items():
            page.locator(f"#id_{name}").fill(str(value))
        go_on(page)
        page.get_by_text("Pin parts of the strategy").click()
        page.locator("#id_pin-weight_dtype").select_option("fp32")
        go_on(page)
        page.get_by_label("Speculative decoding").select_option(model_of(stack, finished_job))
        job_id = launch(page)
        page.wait_for_selector("[data-state-now='succeeded']")
        page.get_by_text("Draft acceptance rate").first.wait_for()
        return {"page": page.text_content("main"), "job": job_id, "trained": tuned["job_id"]}


def greedy_texts(folder: Path) -> list[str]:
    """Return what transformers' own generate writes after each prompt alone."""
    asked = {"prompts": TEXTS, "output_tokens": ASKED["output_tokens"]}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.system.browser.greedy", str(folder)],
        input=json.dumps(asked), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_text_of_a_guessed_generation_is_plain_greedys(guessed, stack):
    path = output_of(stack.host_dir, guessed["job"]) / "outputs" / "outputs.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    folder = output_of(stack.host_dir, guessed["trained"]) / "model"

    assert [line["prompt"] for line in lines] == TEXTS
    assert [line["text"] for line in lines] == greedy_texts(folder)


def test_the_job_was_told_of_the_guessing_model_and_says_how_often_it_was_right(guessed, stack):
    spec = json.loads((output_of(stack.host_dir, guessed["job"]).parent / "spec.json").read_text())
    speculation = spec["spec"]["speculation"]
    attempt = output_of(stack.host_dir, guessed["trained"]).parent.name

    assert speculation["model"]["attempt_id"] != attempt
    assert spec["spec"]["model"]["attempt_id"] == attempt
    assert re.search(r"draft acceptance rate\W+[\d.]+", guessed["page"].lower())
