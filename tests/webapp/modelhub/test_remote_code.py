"""Code of repositories: admins allow it at a commit, and only then a claim hands it on."""

import pytest

from runners.jobspec import EvaluateSpec, HubModel
from tests.webapp.conftest import claim, client_of
from webapp.accounts.models import Membership, Team
from webapp.agents.dispatch import needs_of
from webapp.audit.models import Event
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Attempt, Job
from webapp.modelhub import remote_code
from webapp.modelhub.models import TrustedCode
from webapp.modelhub.remote_code import code_allow, code_forbid, trusted_among

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
A, B = "a" * 40, "b" * 40
KEY = f"acme/coded@{A}"


def test_a_permission_is_of_one_commit_and_of_both_teams(team):
    other = Team.objects.create(name="Owners of the host")
    row = code_allow(team=team, name=KEY, reason=" read by olga ", by="olga")
    assert code_allow(team=team, name=KEY, reason="again", by="otto") == row
    assert (str(row.reason), row.allowed_by) == ("read by olga", "olga")
    assert trusted_among([KEY, f"acme/coded@{B}", f"acme/other@{A}"], {team.pk}) == (KEY,)
    assert trusted_among([KEY], {team.pk, other.pk}) == ()
    code_allow(team=other, name=KEY, reason="", by="otto")
    assert trusted_among([KEY], {team.pk, other.pk}) == (KEY,)
    code_forbid(row=row, by="olga")
    assert trusted_among([KEY], {team.pk, other.pk}) == ()
    rows = Event.objects.filter(kind__startswith="code.", team_id=team.pk).order_by("pk")
    kinds = rows.values_list("kind", "detail")
    assert list(kinds) == [
        ("code.allowed", {"model": KEY, "reason": "read by olga"}),
        ("code.forbidden", {"model": KEY}),
    ]


def test_what_states_no_commit_is_refused_with_the_way_out(team, monkeypatch):
    for name in ("acme/coded", "acme/coded@main", f"acme/coded@{A[:12]}", f"coded@{A}",
                 f"datasets/acme/coded@{A}", f"{KEY}\n x", f"ms://{KEY}"):  # fmt: skip
        with pytest.raises(InvalidProblem, match="40 digits of the commit whose code you have"):
            code_allow(team=team, name=name, reason="", by="olga")
    with pytest.raises(InvalidProblem, match="shorten it"):
        code_allow(team=team, name=KEY, reason="x" * 301, by="olga")
    monkeypatch.setattr(remote_code, "MOST", 0)
    with pytest.raises(InvalidProblem, match="forbid some"):
        code_allow(team=team, name=KEY, reason="", by="olga")
    assert not TrustedCode.objects.exists()


def test_a_claim_hands_on_what_is_allowed_at_that_time(job, team):
    def handed(revision: str = A, hub: str = "huggingface") -> tuple[str, ...]:
        model = HubModel(repository="acme/coded", revision=revision, hub=hub)
        spec = EvaluateSpec(model=model)
        Job.objects.filter(pk=job.pk).update(spec=spec.model_dump(mode="json"))
        attempt = Attempt.objects.get(pk=job.current_attempt_id)
        before = needs_of(attempt).trusted_code  # for the host's preflight
        claimed = claim(attempt).trusted_code
        assert before == claimed
        return claimed

    assert handed() == ()
    row = code_allow(team=team, name=KEY, reason="", by="olga")
    assert (handed(), handed(hub="")) == ((KEY,), (KEY,))  # "": the host's usual hub
    assert (handed("main"), handed(B), handed(hub="modelscope")) == ((), (), ())
    code_forbid(row=row, by="olga")
    assert handed() == ()


def test_only_admins_change_the_page_and_everybody_sees_it(team, alice, olga):
    page, body = "/models/code/", {"model": KEY, "reason": "read"}
    assert client_of(olga).post(f"{page}save/", body).status_code == 403
    Membership.objects.filter(user=olga).update(role="admin")
    admin = client_of(olga)
    for sent, field in [
        ({"model": "acme/coded", "reason": "read by olga"}, "model"),
        ({"model": KEY, "reason": "x" * 301}, "reason"),
        ({"model": "", "reason": "read by olga"}, "model"),
    ]:
        wrong = admin.post(f"{page}save/", sent)
        form = wrong.context["form"]
        assert (wrong.status_code, list(form.errors), form.data.dict()) == (422, [field], sent)
        assert sent["reason"] in wrong.content.decode()  # nothing typed is lost
    assert (
        "and of no other commit" in admin.post(f"{page}save/", body, follow=True).content.decode()
    )
    shown = client_of(alice).get(page).content.decode()
    assert ("acme/coded" in shown, "Admins of the team allow" in shown) == (True, True)
    row = TrustedCode.objects.get()
    assert client_of(alice).post(f"{page}{row.pk}/delete/").status_code == 403
    admin.post(f"{page}{row.pk}/delete/")
    assert not TrustedCode.objects.exists()
