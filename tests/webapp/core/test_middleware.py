"""What a person sees of a refusal that a page did not expect."""

import pytest
from django.contrib.messages import get_messages
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpResponse

from webapp.core.middleware import ProblemMiddleware
from webapp.core.problems import ConflictProblem, ForbiddenProblem, NotFoundProblem

pytestmark = pytest.mark.django_db


@pytest.fixture
def answer(rf, alice):
    """Answer an exception that a view raised."""

    def give(exception: Exception, referer: str = ""):
        request = rf.post("/jobs/1/stop/", headers={"Referer": referer})
        request.user = alice
        for middleware in (SessionMiddleware, MessageMiddleware):
            middleware(lambda _: HttpResponse()).process_request(request)
        response = ProblemMiddleware(lambda _: HttpResponse()).process_exception(
            request, exception
        )
        return response, [str(message) for message in get_messages(request)]

    return give


def test_a_conflict_leads_back_with_its_sentence(answer):
    response, said = answer(ConflictProblem("busy", "Not now."), "http://testserver/jobs/1/")
    assert (response.status_code, response.url) == (302, "http://testserver/jobs/1/")
    assert said == ["Not now."]


@pytest.mark.parametrize(
    "referer", ["", "http://elsewhere.example/", "http://testserver/jobs/1/stop/"]
)
def test_without_a_page_to_go_back_to_it_leads_home(answer, referer):
    assert answer(ConflictProblem("busy", "Not now."), referer)[0].url == "/"


@pytest.mark.parametrize(("problem", "status"), [(NotFoundProblem, 404), (ForbiddenProblem, 403)])
def test_what_is_not_there_or_not_allowed_has_its_own_page(answer, problem, status):
    assert answer(problem("x", "No."))[0].status_code == status


def test_other_exceptions_are_not_hidden(answer):
    assert answer(RuntimeError("bug"))[0] is None
