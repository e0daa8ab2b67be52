"""schemathesis to its end against a running product, as a host, as a person and as nobody.

``manage.py test -m soak`` runs every phase with the examples that schemathesis draws by itself.
"""

import pytest

from tests.system.faults import contract

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = contract.begin(tmp_path_factory.mktemp("contract"))
    try:
        contract.document(made)
        yield made
    finally:
        made.stop()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["host", "person", "token", "nobody"])
def test_every_answer_is_one_that_the_document_names(site, capsys, name):
    host = f"hal-{name}"  # one each: what a caller leaves running holds its host's only device
    contract.host_without_agent(site, host)
    caller = next(one for one in contract.callers(site, host) if one.name == name)
    known = contract.known_things(site, host)

    code, printed = contract.run(
        site, caller, known,
        "--exclude-path", contract.ROTATE, "--exclude-path", contract.STREAM,
    )  # fmt: skip

    with capsys.disabled():
        print(f"\nschemathesis as {name}: exit {code}\n{contract.summary(printed)}")  # noqa: T201
    assert code == 0, printed[-20_000:]
