"""Every text that somebody may choose is hostile, and every page is opened in a real browser.

What is planted comes from the models and what is opened from the URL configuration: a column or
an address that is new is tried without a line here.
"""

import json
import re

import pytest
from django.contrib import admin

from tests.system.browser.driving import JOB_PATH, Visitors
from tests.system.browser.planting import MARK
from tests.webapp.accounts.test_matrix import (
    ADMIN,
    HOST,
    MEMBER,
    OPERATOR,
    PRACTITIONER,
    QUERY,
    RULES,
    addresses,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]
VIEWERS = {MEMBER: "vera", PRACTITIONER: "alice", OPERATOR: "olga", ADMIN: "adam"}
PAGES = [route for route, rule in RULES.items() if rule.method == "get" and rule.needs != HOST]
DOWNLOADS = {
    "jobs/<slug:job_id>/artefacts/<str:name>/download/",
    "jobs/<slug:job_id>/logs/download/",
    "jobs/<slug:job_id>/figures.<slug:form>",
    "audit/export/",
    "plans/<str:plan_id>/exports/<slug:key>/",
}
ADMINISTRATION = set(addresses(admin.site.get_urls())) - {"logout/"}  # which shows nothing
# What would act: handlers, scripts of no file and no nonce, addresses that are scripts, and the
# elements of which the planted texts are made.
ACTING = """
() => [...document.querySelectorAll('*')].flatMap((element) => {
  const found = [...element.attributes].filter((a) => /^on/i.test(a.name)).map((a) => a.name);
  const address = ['href', 'src', 'action', 'formaction', 'xlink:href']
    .filter((name) => /^\\s*(javascript|vbscript|data:text)/i.test(element.getAttribute(name) || ''));
  const isData = element.type === 'application/json' || element.type === 'speculationrules';
  const isLoose = element.tagName === 'SCRIPT' && !element.src && !element.nonce && !isData;
  const isOurs = element.matches('img[src="x"], b[style]');
  return [...found, ...address, ...(isLoose ? ['inline script'] : []), ...(isOurs ? ['markup'] : [])]
    .map((word) => `${word}: ${element.outerHTML.slice(0, 200)}`);
})
"""
SEEN = f"""
() => ({{
  hacked: window.hacked ?? null,
  acting: ({ACTING})(),
  broken: window.broken,
  text: document.title + document.body.innerText,
}})
"""


# Where planted texts must be seen: else the pages were safe because they showed nothing.
SHOWING = {
    "plans/": "vera",
    "jobs/": "vera",
    "jobs/<slug:job_id>/": "vera",
    "jobs/<slug:job_id>/logs/": "vera",
    "jobs/<slug:job_id>/events/": "vera",
    "hosts/": "vera",
    "hosts/<slug:slug>/": "olga",
    "hosts/add/<slug:token_id>/": "olga",
    "models/": "vera",
    "audit/": "adam",
    "settings/secrets/": "olga",
    "queue/<slug:pool_id>/": "vera",
    "plans/<str:plan_id>/": "vera",
}


@pytest.fixture(scope="module")
def planted(stack, finished_job) -> dict:
    """Plant; the host is away then, or its next beat would tell the truth again."""
    client = stack.client("alice")
    _, where = client.post(f"/jobs/{finished_job}/run-again/", {})
    running = JOB_PATH.search(where)[1]
    client.wait_for_state(running, "starting", "running")
    for part in ("host", "control", "ticker"):
        stack.kill(part)
    stack.run("-m", "runners", "stop-all", "--dir", str(stack.host_dir))
    code = "from tests.system.browser.planting import plant; plant()"
    told = stack.run("manage.py", "shell", "--verbosity", "0", "-c", code)
    return {"running": running, **json.loads(told[told.index("{") :])}


@pytest.fixture(scope="module")
def people(browser, stack, planted):
    """A page of each role, in windows that nobody has used before what was planted."""
    with Visitors(browser, stack.base_url) as visitors:
        pages = {name: visitors.open(name) for name in ("vera", "alice", "olga", "adam", "root")}
        for page in pages.values():
            page.on("dialog", lambda dialog: dialog.dismiss())
        yield pages


def filled(route: str, planted: dict) -> str:
    path = route
    for argument, value in planted["arguments"].items():
        path = path.replace(argument, value)
    assert "<" not in path, f"no value for the argument of {route}"
    return f"/{path}{QUERY.get(route, '')}"


def opened(page, url: str) -> str:
    """Open a page and return its title and text, once it has shown that nothing planted acted."""
    answer = page.goto(url)
    policy = answer.headers["content-security-policy"]
    assert answer.status < 500, url
    assert "unsafe" not in policy, url
    seen = page.evaluate(SEEN)
    assert seen["hacked"] is None, url
    assert seen["acting"] == [], url
    assert seen["broken"] == [], url
    assert "zqqz" not in seen["text"], f"{url} reckons with a template that somebody planted"
    return seen["text"]


@pytest.mark.parametrize("route", sorted(set(PAGES) - DOWNLOADS))
def test_nothing_planted_acts_on_a_page(route, people, planted, stack):
    viewer = SHOWING.get(route) or VIEWERS.get(RULES[route].needs, "olga")
    text = opened(people[viewer], stack.base_url + filled(route, planted))
    if route in SHOWING:
        assert MARK in text


def test_what_must_show_a_planted_text_is_a_page():
    assert set(SHOWING) <= set(PAGES) - DOWNLOADS


@pytest.mark.parametrize("tab", ["summary", "alternatives", "history", "limits", "explanation"])
def test_nothing_planted_acts_on_a_tab_of_a_plan(tab, people, planted, stack):
    plan = planted["arguments"]["<str:plan_id>"]
    opened(people["alice"], f"{stack.base_url}/plans/{plan}/{tab}/")


@pytest.mark.parametrize("name", sorted(ADMINISTRATION))
def test_nothing_planted_acts_in_the_administration(name, people, planted, stack):
    page = people["root"]
    base = f"{stack.base_url}/admin/"
    folder = re.match(r"\w+/\w+/", name)
    key = "1"
    if folder and "<" in name:
        listed = page.request.get(base + folder[0]).text()
        link = re.search(rf'href="/admin/{folder[0]}([^/"]+)/change/', listed)
        key = link[1] if link else "1"
    opened(page, base + re.sub(r"<[^>]+>|\(\?P.*", key, name))


def test_a_search_and_a_filter_show_what_was_asked_as_text(people, stack):
    asked = "%22%3E%3Cscript%3Ehacked%3D1%3C%2Fscript%3E%3Cimg%20src%3Dx%20onerror%3Dhacked%3D1%3E"
    for path in ("search/?q=", "jobs/?q=", "models/?q=", "audit/?actor=", "limits/?question="):
        opened(people["adam"], f"{stack.base_url}/{path}{asked}")


def test_a_page_that_is_missing_does_not_become_what_was_asked_for(people, stack):
    opened(people["vera"], f"{stack.base_url}/%3Cscript%3Ehacked=1%3C/script%3E/")


def test_lines_that_come_live_are_text(people, planted, stack):
    job = planted["running"]
    page = people["vera"]
    opened(page, f"{stack.base_url}/jobs/{job}/")
    frame = {"event": "job.log", "topic": f"job:{job}"}
    line = f"<img src=x onerror=hacked=1><script>hacked=1</script>{MARK} live"
    data = {"host": 0, "lines": [{"seq": 10**9, "t_ms": 0, "stream": "stdout", "text": line}]}
    page.evaluate(
        "detail => document.dispatchEvent(new CustomEvent('live:frame', {detail}))",
        {**frame, "data": data},
    )
    page.wait_for_function(f"() => document.body.textContent.includes('{MARK} live')")
    assert page.evaluate(ACTING) == []
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("route", sorted(DOWNLOADS))
def test_a_download_is_never_shown_as_a_page(route, people, planted, stack):
    arguments = {**planted["arguments"], "<str:name>": "model"}
    path = filled(route, {"arguments": arguments})
    answer = people["adam"].request.get(stack.base_url + path)
    assert "text/html" not in answer.headers["content-type"] or answer.status == 404
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_columns_were_planted_in_every_part_of_the_product(planted):
    parts = {label.split(".")[0] for label in planted["filled"]}
    assert {"accounts", "hosts", "jobs", "modelhub", "plans"} <= parts
    assert sum(len(names) for names in planted["filled"].values()) >= 15
