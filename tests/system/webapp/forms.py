"""A fuzzer of forms: crawls the pages of a site, and posts each form with odd values."""

import re
from collections import deque
from collections.abc import Iterator
from html.parser import HTMLParser
from random import Random
from typing import NamedTuple
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx
from django.urls import Resolver404, resolve

TOKEN = "csrfmiddlewaretoken"
NOT_VISITED = re.compile(r"/(logout|static|live|api/v1/(docs|openapi))|\.(zip|csv|tar|log|bin)$")
# They end the session.
NOT_POSTED = re.compile(r"/(logout|settings/(password|sessions)|admin/auth/user/\d+/password)/")
ENDS_SOMETHING = re.compile(r"/(delete|revoke|retire|remove|abandon|stop)/")  # sent last
PAGES_OF_A_SHAPE = 3  # such as the pages of three jobs
SERVER_ERROR = 500
BUSY = 429
ODD = [
    "", " ", "0", "-1", "-0.0", "1e308", "-1e999", "nan", "inf", "9" * 400, "2147483648",
    "9223372036854775808", "1_000", "٣", "½", "0x10", "1,5", "true", "null", "[]", "{}", "{" * 2000,
    "a" * 70_000, "\x00", "a\x00b", "\ud800", "\u202eabc", "e\u0301" * 50, "😀" * 200, "\r\n\t",
    "../../etc/passwd", "' OR 1=1 --", "<script>alert(1)</script>", "{{ 7 }}", "%s%n", "\\",
    "2026-02-30", "99999-01-01T00:00", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "http://[::1", "a=b,a=c",
]  # fmt: skip


class Field(NamedTuple):
    """A field of a form: its name, kind, and the values that the page offers."""

    name: str
    kind: str
    values: tuple[str, ...]


class Form(NamedTuple):
    """A form as a page shows it."""

    method: str
    action: str
    fields: tuple[Field, ...]

    @property
    def shape(self) -> tuple[str, ...]:
        """What forms of several pages have in common: method, address, names of fields."""
        route = route_of(urlsplit(self.action).path)
        return (self.method, route, *sorted({field.name for field in self.fields}))


class Page(HTMLParser):
    """The links and forms of a page."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__()
        self.url, self.links, self.forms = url, [], []
        self._open: tuple[str, str, list[Field]] | None = None
        self._chosen: list[str] | None = None  # options of the open select
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "a" and found.get("href"):
            self.links.append(urldefrag(urljoin(self.url, found["href"])).url)
        for name in ("hx-get", "hx-post"):
            if name in found:
                self.links.append(urljoin(self.url, found[name]))
        if tag == "form":
            action = urljoin(self.url, found.get("action") or found.get("hx-post") or self.url)
            method = "post" if "hx-post" in found else found.get("method", "get").lower()
            self._open = (method, action, [])
        elif tag in {"input", "textarea", "select", "button"} and self._open and found.get("name"):
            values = (found["value"],) if "value" in found else ()
            self._open[2].append(Field(found["name"], found.get("type", tag), values))
            self._chosen = [] if tag == "select" else None
        elif tag == "option" and self._chosen is not None:
            self._chosen.append(found.get("value", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "select" and self._open and self._chosen is not None:
            field = self._open[2].pop()
            self._open[2].append(field._replace(values=tuple(self._chosen)))
            self._chosen = None
        elif tag == "form" and self._open:
            method, action, fields = self._open
            self.forms.append(Form(method, action, tuple(fields)))
            self._open = None


def crawl(
    browser: httpx.Client, start: str, most: int = 150
) -> Iterator[tuple[httpx.Response, Page]]:
    """Visit the pages that can be reached by links; of pages alike but for an id a few."""
    waiting, seen, shapes = deque([start]), {start}, dict[str, int]()
    while waiting and most:
        url = waiting.popleft()
        answer = browser.get(url)
        most -= 1
        page = Page(
            str(answer.url), answer.text if "html" in answer.headers["content-type"] else ""
        )
        yield answer, page
        for link in [*page.links, *(form.action for form in page.forms if form.method == "get")]:
            parts = urlsplit(link)
            shape = route_of(parts.path) + "?" + ",".join(re.findall(r"(\w+)=", parts.query))
            is_own = parts.netloc == urlsplit(start).netloc and parts.scheme in {"http", "https"}
            if not is_own or link in seen or NOT_VISITED.search(parts.path):
                continue
            seen.add(link)
            shapes[shape] = shapes.get(shape, 0) + 1
            if shapes[shape] <= PAGES_OF_A_SHAPE:
                waiting.append(link)


def route_of(path: str) -> str:
    """Return the pattern of a page's address."""
    try:
        return str(resolve(path).route)
    except Resolver404:
        return path


def odd_values(form: Form, random: Random) -> dict[str, list[str]]:
    """Return values for a form's fields: as offered, odd, missing, or several."""
    values: dict[str, list[str]] = {}
    share = random.choice([0.1, 0.3, 1.0])
    for field in form.fields:
        if field.name == TOKEN:
            continue
        offered = [random.choice(field.values)] if field.values else []
        if random.random() < share:
            offered = random.choice(
                [[], [random.choice(ODD)], random.sample(ODD, 3), offered * 40]
            )
        values[field.name] = values.get(field.name, []) + offered
    if random.random() < 0.1:
        values[random.choice(ODD[:-1])[:50]] = [random.choice(ODD)]
    return values


def encoded(values: dict[str, list[str]]) -> bytes:
    """Return a form's body; half a surrogate is sent as its three bytes."""
    quote = lambda text: "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))  # noqa: E731
    return "&".join(f"{quote(k)}={quote(v)}" for k, many in values.items() for v in many).encode()


class Fault(NamedTuple):
    """An answer of 500 or more, and the request that repeats it."""

    status: int
    method: str
    url: str
    body: str


def fuzz(browser: httpx.Client, form: Form, referer: str, random: Random) -> Fault | None:
    """Send one form with odd values; return a fault if the server failed."""
    body = encoded(odd_values(form, random))
    if form.method == "post":
        own = [field.values[0] for field in form.fields if field.name == TOKEN]
        body += f"&{TOKEN}={own[0] if own else ''}".encode()
        answer = browser.post(
            form.action, content=body,
            headers={"Content-Type": "application/x-www-form-urlencoded", "Referer": referer},
        )  # fmt: skip
    else:
        answer = browser.get(form.action.partition("?")[0] + "?" + body.decode()[:6000])
    if answer.status_code < SERVER_ERROR:
        return None
    return Fault(answer.status_code, form.method, form.action, body.decode()[:2000])
