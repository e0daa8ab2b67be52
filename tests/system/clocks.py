"""Clocks of real processes that a test sets while they run, as a person sets a machine's."""

import os
from pathlib import Path

from tests.stack import ROOT

# Read by each Python process at its start, before the product. One travel is shifted: threads
# that ask for the time while a travel begins or ends would fail.
SET_LATER = """
import os, threading, time
import time_machine
offset = __file__.replace("sitecustomize.py", "offset")

def wanted(otherwise):
    with open(offset) as file:
        return float(file.read() or otherwise)

shown = wanted(0.0)
traveller = time_machine.travel(time.time() + shown, tick=True).start()
time.time()  # it counts from its first call

def follow():
    global shown
    while True:
        time.sleep(0.05)
        before, shown = shown, wanted(shown)
        if shown != before:
            traveller.shift(shown - before)

def begin():
    threading.Thread(target=follow, daemon=True).start()

begin()
os.register_at_fork(after_in_child=begin)  # a fork has the time and no thread
"""


class Clock:
    """The time of day of processes that have ``variables``; their monotonic time stays right."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        """Make a clock that shows so many seconds more than the right time."""
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SET_LATER)
        self._offset = folder / "offset"
        self.variables = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        self.set(seconds)

    def set(self, seconds: float) -> None:
        """Let it show so many seconds more than the right time, within 0.1 s."""
        self._offset.write_text(str(seconds))
