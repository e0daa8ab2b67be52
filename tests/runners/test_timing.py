"""One scale shortens what server and host wait for, and never below what a machine can keep."""

import os
import subprocess
import sys

import pytest

from runners import timing

ASK = (
    "from runners import agent, supervisor; from webapp.hosts import contact;"
    "print(agent.LIVE_BEAT_SECONDS, supervisor.TICK_SECONDS, contact.UNREACHABLE_AFTER_SECONDS)"
)


@pytest.mark.parametrize("text", ["0", "-1", "2", "nan", "soon"])
def test_a_scale_that_makes_no_sense_is_refused_with_the_way_out(text):
    with pytest.raises(ValueError, match=f"SLIPWAY_TIME_SCALE is '{text}'.*Unset it"):
        timing.scale_of(text)


def test_without_the_setting_every_span_is_as_documented():
    assert timing.SCALE == 1
    assert timing.scaled(90.0, least=2.0) == 90.0


def test_a_shortened_span_keeps_its_least_and_never_grows(monkeypatch):
    monkeypatch.setattr(timing, "SCALE", 0.02)

    spans = [timing.scaled(90.0), timing.scaled(2.0, least=0.5), timing.scaled(0.25, least=0.5)]

    assert spans == [1.8, 0.5, 0.25]


def test_server_and_host_read_the_same_setting():
    environment = os.environ | {
        "SLIPWAY_TIME_SCALE": "0.1",
        "DJANGO_SETTINGS_MODULE": "webapp.settings",
    }
    code = f"import django; django.setup(); {ASK}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )

    assert done.stdout.split() == [b"0.2", b"0.2", b"9.0"]
