"""Many rows, each with its own values, in one statement a set of fields."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from webapp.core.clock import now
from webapp.core.queries import RowChange, update_each
from webapp.hosts.models import Host

pytestmark = pytest.mark.django_db


def test_each_row_gets_its_own_values(host, other_host):
    instant = now()
    changes = {
        host.pk: {"last_beat": {"gpus": [1, "ü"]}, "last_seen_at": instant},
        other_host.pk: {"last_beat": {}, "last_seen_at": None},
    }
    update_each(Host, [RowChange(pk, values) for pk, values in changes.items()])
    rows = Host.objects.in_bulk(changes)
    assert {
        pk: {"last_beat": row.last_beat, "last_seen_at": row.last_seen_at}
        for pk, row in rows.items()
    } == changes


def test_rows_with_other_fields_keep_the_rest(host, other_host):
    update_each(
        Host, [RowChange(host.pk, {"boot_id": "b"}), RowChange(other_host.pk, {"name": "n"})]
    )
    host.refresh_from_db()
    assert (host.boot_id, host.name != "n") == ("b", True)
    assert Host.objects.get(pk=other_host.pk).name == "n"


def test_a_row_that_changes_twice_keeps_the_later_value(host):
    update_each(Host, [RowChange(host.pk, {"boot_id": text}) for text in ("first", "later")])
    assert Host.objects.get(pk=host.pk).boot_id == "later"


def test_nothing_to_change_asks_nothing():
    with CaptureQueriesContext(connection) as asked:
        update_each(Host, [])
    assert len(asked) == 0
