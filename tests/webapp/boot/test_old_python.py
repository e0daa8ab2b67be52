import ast
import runpy
import sys
from pathlib import Path

import pytest

MANAGE = Path(__file__).resolve().parents[3] / "manage.py"


def test_manage_py_is_readable_for_python_3_6():
    ast.parse(MANAGE.read_text(), feature_version=(3, 6))


def test_an_old_python_gets_one_sentence_with_the_way_out(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 8, 18, "final", 0))

    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(MANAGE), run_name="__main__")

    assert "needs Python 3.11 or newer" in str(stopped.value)
    assert "python3.12 manage.py up" in str(stopped.value)
