"""A newcomer's walk through the whole product, step by step, each step a picture.

``screenshots.py OUTDIR walk`` takes it; a step is a name, a page and what the newcomer does there.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from playwright.sync_api import Page

from tests.stack import PASSWORD, Stack
from tests.system.browser.driving import SLOW_MS, go_on, launch, walk_to_review

Shoot = Callable[[str, str], None]  # an address of the product and the name of its picture
IS_STILL = "() => !document.querySelector('.htmx-request')"
CHOOSE = """(select, value) => {
  select.value = value;
  select.dispatchEvent(new Event("change", { bubbles: true }));
}"""
TABS = ("alternatives", "why", "limits", "exports", "history")


@dataclass(frozen=True)
class Wanted:
    """A plan that a newcomer asks for: what the wizard's fields are filled with."""

    name: str
    goal: str
    model: str
    device: str
    devices: int = 1
    machines: int = 1
    choices: dict[str, str] = field(default_factory=dict)  # of the lists, by the field's name
    numbers: dict[str, str] = field(default_factory=dict)
    is_shown: bool = False  # every step and tab of it, not its plan alone


LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
WANTED = (
    Wanted("serve-fits", "serve", LLAMA_8B, "h100-sxm5-80gb", is_shown=True),
    Wanted("serve-too-large", "serve", LLAMA_70B, "rtx-4090", choices={"pin-weight_dtype": "bf16"}),
    Wanted(
        "serve-misses", "serve", LLAMA_70B, "a100-sxm4-80gb", 4,
        choices={"latency_target": "code"}, numbers={"concurrency": "64", "input_tokens": "4096"},
    ),
    Wanted("serve-mixture", "serve", MIXTRAL, "h100-sxm5-80gb", 4, numbers={"concurrency": "64"}),
    Wanted("generate", "generate", LLAMA_8B, "l40s", numbers={"batch_size": "128"}),
    Wanted("finetune-fits", "finetune", LLAMA_70B, "h100-sxm5-80gb", 4, choices={"method": "qlora"}),
    Wanted("finetune-too-large", "finetune", LLAMA_8B, "rtx-4090", choices={"method": "full"}),
    Wanted("pretrain", "pretrain", LLAMA_8B, "h100-sxm5-80gb", 8, 4, is_shown=True),
    Wanted("compress", "compress", LLAMA_8B, "rtx-4090", choices={"method": "awq"}, is_shown=True),
)  # fmt: skip


def fill_in(page: Page, stack: Stack, wanted: Wanted, shoot: Shoot) -> str:
    """Walk the wizard for a plan, save it, and return the path of its page."""
    page.goto(f"{stack.base_url}/plans/new/")
    for _ in range(6):
        step = page.url.split("/edit/")[1].strip("/")
        if step == "review":
            break
        _fill_step(page, step, wanted)
        if wanted.is_shown:
            shoot(_path(page, stack), f"wizard-{wanted.name}-{step}")
        go_on(page)
    if wanted.is_shown:
        shoot(_path(page, stack), f"wizard-{wanted.name}-review")
    page.locator("button[name='go'][value='keep']").click()
    page.wait_for_url(lambda url: "/edit/" not in url)
    return _path(page, stack)


def _path(page: Page, stack: Stack) -> str:
    return page.url.removeprefix(stack.base_url)


def _fill_step(page: Page, step: str, wanted: Wanted) -> None:
    if step == "goal":
        _press(page, "goal", wanted.goal)
    if step == "model":
        _press(page, "source", "catalog")
        page.locator("#id_catalog_id").fill(wanted.model)
    if step == "hardware":
        _press(page, "choice", "catalog")
        page.locator("#id_device-options").evaluate(CHOOSE, wanted.device)
        page.locator("#id_devices_per_node").fill(str(wanted.devices))
        page.locator("#id_nodes").fill(str(wanted.machines))
    for name, value in wanted.choices.items():
        for each in page.locator(f"select[name='{name}']").all():
            page.evaluate(
                "for (const d of document.querySelectorAll('details.disclosure')) d.open = true"
            )
            each.select_option(value)
    for name, value in wanted.numbers.items():
        for each in page.locator(f"input[name='{name}']").all():
            each.fill(value)
    page.wait_for_timeout(700)
    page.wait_for_function(IS_STILL, timeout=SLOW_MS)


def _press(page: Page, name: str, value: str) -> None:
    page.locator(f"input[name='{name}'][value='{value}']").check()


def plan_pages(page: Page, stack: Stack, shoot: Shoot) -> dict[str, str]:
    """Make every plan, shoot its page and the tabs of some; return the paths."""
    paths = {}
    for wanted in WANTED:
        paths[wanted.name] = path = fill_in(page, stack, wanted, shoot)
        shoot(path, f"plan-{wanted.name}")
        for tab in TABS if wanted.is_shown else ():
            shoot(f"{path}{tab}/", f"plan-{wanted.name}-{tab}")
    return paths


def versions(page: Page, stack: Stack, path: str, shoot: Shoot) -> None:
    """Edit a saved plan, see the draft beside it, save it as its next version, clone that."""
    page.goto(f"{stack.base_url}{path}")
    page.get_by_role("link", name="Edit").click()
    page.wait_for_url(re.compile("/edit/goal/"))
    draft = _path(page, stack)
    page.goto(f"{stack.base_url}{draft.replace('/goal/', '/workload/')}")
    page.locator("#id_concurrency").fill("64")
    go_on(page)
    shoot(path, "saved-plan-with-draft")
    shoot(draft.replace("/goal/", "/review/"), "draft-review")
    page.goto(f"{stack.base_url}{draft.replace('/goal/', '/review/')}")
    page.locator("button[name='go'][value='keep']").click()
    page.wait_for_url(lambda url: "/edit/" not in url)
    shoot(f"{_path(page, stack)}history/", "plan-versions")
    page.goto(page.url)
    page.get_by_role("button", name="Clone").click()
    page.wait_for_load_state()
    shoot(_path(page, stack), "plan-clone")
    shoot("/plans/", "plans")


def demo(page: Page, stack: Stack, shoot: Shoot, live_after_ms: int) -> str:
    """Launch the demo, look at it while it runs and at its end; return the job's id."""
    walk_to_review(page, stack.base_url)
    shoot(_path(page, stack), "demo-review")
    job_id = launch(page)
    shoot(f"/jobs/{job_id}/", "job-started")
    client = stack.client("alice")
    client.wait_for_state(job_id, "running")
    page.wait_for_timeout(live_after_ms)
    shoot(f"/jobs/{job_id}/", "job-live")
    shoot("/", "home-running")
    shoot("/queue/", "queue-running")
    client.wait_for_state(job_id, "succeeded")
    page.wait_for_timeout(2000)
    shoot(f"/jobs/{job_id}/", "job-done")
    for tab in ("metrics", "logs", "events", "config", "artefacts"):
        shoot(f"/jobs/{job_id}/{tab}/", f"job-{tab}")
    return job_id


def compress(page: Page, stack: Stack, job_id: str, shoot: Shoot) -> str:
    """Compress the demo's model as its page offers; return the job's id."""
    page.goto(f"{stack.base_url}/jobs/{job_id}/")
    page.get_by_role("link", name="Compress this model").click()
    page.wait_for_load_state()
    shoot(_path(page, stack), "compress-review")
    small = launch(page)
    stack.client("alice").wait_for_state(small, "succeeded")
    page.wait_for_timeout(2000)
    shoot(f"/jobs/{small}/", "job-compressed")
    shoot(f"/compare/?job={job_id}&job={small}", "compare")
    return small


def rest(shoot: Shoot, job_id: str) -> None:
    """Look at every other page of a site that has run something."""
    for name, path in {
        "home": "/",
        "jobs": "/jobs/",
        "queue": "/queue/",
        "team-limits": "/queue/limits/",
        "compare-choose": "/compare/",
        "job-clone": f"/jobs/{job_id}/run-again/",
        "hosts": "/hosts/",
        "host": "/hosts/this-machine/",
        "models": "/models/",
        "model": f"/models/{LLAMA_8B}/",
        "limits": "/limits/",
        "limits-answer": "/limits/?question=most_users&ask=1&hardware=rtx-4090",
        "techniques": "/techniques/",
        "docs": "/docs/",
        "docs-trust": "/docs/trust/",
        "search": "/search/?q=llama",
        "data": "/data/",
        "secrets": "/settings/secrets/",
        "sessions": "/settings/sessions/",
        "password": "/settings/password/",
        "missing": "/nowhere/",
    }.items():
        shoot(path, name)


def change_password(page: Page, stack: Stack) -> str:
    """Change the password to the same words and one more; return what the page says."""
    page.goto(f"{stack.base_url}/settings/password/")
    fields = page.locator("main input[type='password']")
    for at, value in enumerate((PASSWORD, f"{PASSWORD}-2", f"{PASSWORD}-2")):
        fields.nth(at).fill(value)
    page.locator("main button").click()
    page.wait_for_load_state()
    return page.inner_text("main")


def log_out(page: Page) -> None:
    """Log out through the account's menu."""
    page.locator(".menu > summary").first.click()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url(re.compile("/login/"))
