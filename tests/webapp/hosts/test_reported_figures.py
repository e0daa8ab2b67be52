"""Pages and plans survive whatever figures, versions and names a host reports."""

import pytest

from runners.jobspec.base import plain
from runners.shared.messages import Beat, EnrollRequest
from tests.webapp.conftest import make_beat, make_facts, make_microbench
from webapp.agents.heartbeats import host_beat
from webapp.core.problems import ConflictProblem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.services import host_enroll, token_create

pytestmark = pytest.mark.django_db


GPU = {"index": 0, "uuid": "GPU-1", "name": "A GPU", "memory_bytes": 1024**3}
BUILT = {"packages": {"torch": "2"}, "torch_cuda_version": "twelve", "cuda_version": "x.y"}


def test_versions_that_are_no_numbers_leave_a_page(host, olga, client):
    facts = make_facts(gpus=[GPU], **BUILT)
    host_beat(host=host, beat=make_beat(facts=facts))
    client.force_login(olga)
    assert client.get(f"/hosts/{host.slug}/").status_code == 200


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("facts", "memory_bytes"), 0),
        (("microbench", "devices", 0, "memory_bandwidth_bytes_per_second"), 0),
        (("microbench", "devices", 0, "flops_per_second"), {"fp1": 1e9}),
    ],
)
def test_figures_that_no_machine_has_are_named_and_break_no_page(
    host, alice, client, place, value
):
    beat = make_beat(facts=make_facts(), microbench=make_microbench()).model_dump(mode="json")
    *way, last = place
    inner = beat
    for key in way:
        inner = inner[key]
    inner[last] = value
    host_beat(host=host, beat=Beat.model_validate(plain(beat)))
    host.refresh_from_db()
    with pytest.raises(ConflictProblem, match=f"{host.name} reported figures") as refused:
        cluster_for_host(host)
    assert refused.value.code == "host_unknown"
    client.force_login(alice)
    assert client.get("/models/llama-3.1-8b/").status_code == 200


def test_a_name_longer_than_its_column_is_refused_and_a_long_hostname_cut(team):
    body = {"facts": make_facts(hostname="h" * 200).model_dump(mode="json"), "sent_at_ms": 1}
    _, text = token_create(team=team, by=None, name="")
    named = body | {"token": text, "name": "n" * 81}
    request = EnrollRequest
    with pytest.raises(ValueError, match=r"name\n.*at most 80 characters"):
        request.model_validate(named)
    reply = host_enroll(request.model_validate(body | {"token": text}))
    assert reply.name == "h" * 80
