"""Every form of every page that links lead to, sent with odd values: no answer is a 5xx.

``manage.py test -m soak tests/system/webapp/test_forms_soak.py`` runs ``SECONDS`` as each of two
people, on a site of its own with a demo; only one of them opens the administration.
``SLIPWAY_FUZZ_URL`` and ``SLIPWAY_FUZZ_LOGIN`` (``name:password``) name a running one instead, and
``--soak-seed`` repeats a run.
"""

import os
import time
from collections.abc import Iterator
from random import Random

import httpx
import pytest

from tests.stack import PASSWORD, Stack
from tests.system.webapp.forms import (
    BUSY,
    ENDS_SOMETHING,
    NOT_POSTED,
    SERVER_ERROR,
    TOKEN,
    Fault,
    Form,
    Page,
    crawl,
    fuzz,
)

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1800)]
SECONDS = float(os.environ.get("SLIPWAY_FUZZ_SECONDS", "300"))
MAKE_SUPERUSER = f"""
from django.contrib.auth.models import User
from webapp.accounts.models import Membership, Team
user = User.objects.create_superuser("root", password={PASSWORD!r})
Membership.objects.create(user=user, team=Team.objects.earliest("created_at"), role="admin")
"""


@pytest.fixture(params=["olga", "root"])
def site(tmp_path, request) -> Iterator[tuple[str, str, str]]:
    """A site's address, and the name and password of a person."""
    if url := os.environ.get("SLIPWAY_FUZZ_URL"):
        name, _, password = os.environ["SLIPWAY_FUZZ_LOGIN"].partition(":")
        yield url, name, password
        return
    with Stack(tmp_path / "stack", demo_seconds=20) as running:
        running.client().launch_demo()
        running.run("manage.py", "shell", "-c", MAKE_SUPERUSER)
        yield running.base_url, request.param, PASSWORD


def log_in(browser: httpx.Client, name: str, password: str) -> None:
    page = browser.get("/login/")
    assert page.status_code == 200
    (form,) = [one for one in Page(str(page.url), page.text).forms if "login" in one.action]
    (token,) = [field.values[0] for field in form.fields if field.name == TOKEN]
    posted = {"username": name, "password": password, TOKEN: token}
    answer = browser.post("/login/", data=posted, headers={"Referer": str(page.url)})
    assert answer.url.path != "/login/", answer.text[:500]


def test_no_form_and_no_page_answers_with_a_server_error(site, soak_seed, capsys):
    url, name, password = site
    random = Random(soak_seed)  # noqa: S311 (values of a test)
    faults = dict[tuple[str, int], Fault]()
    forms = dict[tuple[str, ...], tuple[Form, str]]()  # of all crawls: a late one is cut short
    ends_at, num_sent = time.monotonic() + SECONDS, 0
    with httpx.Client(base_url=url, follow_redirects=True, timeout=120) as browser:
        log_in(browser, name, password)
        while time.monotonic() < ends_at:
            for answer, page in crawl(browser, f"{url}/"):
                if answer.status_code >= SERVER_ERROR:
                    where = str(answer.url)
                    faults[where, answer.status_code] = Fault(answer.status_code, "get", where, "")
                if answer.status_code == BUSY:
                    time.sleep(1.0)
                found = [one for one in page.forms if not NOT_POSTED.search(one.action)]
                forms |= {one.shape: (one, page.url) for one in found}
                if time.monotonic() > ends_at - SECONDS / 2:
                    break
            chosen = list(forms.values())
            random.shuffle(chosen)
            chosen.sort(key=lambda each: bool(ENDS_SOMETHING.search(each[0].action)))
            for form, referer in chosen * 3:
                fault = fuzz(browser, form, referer, random)
                num_sent += 1
                if fault:
                    faults[fault.url, fault.status] = fault
                if time.monotonic() > ends_at:
                    break
    with capsys.disabled():
        words = f"{len(forms)} forms, {num_sent} sent, {len(faults)} failed"
        print(f"\nas {name}, --soak-seed {soak_seed}: {words}")  # noqa: T201
    assert num_sent > 0
    assert not faults, "\n".join(map(str, faults.values()))
