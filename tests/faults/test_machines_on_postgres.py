"""Two schedulers that share a machine, on a real PostgreSQL: there they do run at once."""

from tests.faults import test_postgres_killed as killed
from tests.faults.test_history_on_postgres import on

pytestmark = killed.pytestmark
postgres = killed.postgres
RACE = "tests/webapp/queue/test_machine_race.py"


def test_one_machine_is_given_out_once_there_too(postgres):
    done = on(postgres.url, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--create-db", RACE)
    assert done.returncode == 0, done.stdout[-3000:]
