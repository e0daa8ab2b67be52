import subprocess
import sys

import pytest

from webapp.boot import cli, environment


def run(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, "manage.py", *arguments],
        cwd=cli.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_django_command_runs_inside_the_environment():
    assert "5.2" in run("version").stdout


def test_without_packages_a_command_says_how_to_get_them(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(environment, "users_own", lambda: None)
    monkeypatch.setattr(environment, "PYTHON", tmp_path / "python")

    assert cli.main(["migrate"]) == 1

    words = capsys.readouterr().err
    assert "`manage.py migrate` needs the environment" in words
    assert "`python3 manage.py up` makes it" in words


def test_the_set_up_code_imports_only_the_standard_library_and_ours():
    code = (
        "import sys\n"
        "from webapp.boot import broker, cli, environment, installer, processes, suite, up, vendor\n"
        "known = set(sys.stdlib_module_names) | {'webapp', 'runners', '__main__'}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} - known))"
    )

    # -S leaves the packages of the environment out, -E the variables that could add them.
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code],
        cwd=cli.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.strip() == "[]", done.stderr


def test_help_of_up_names_what_it_honours(capsys):
    with pytest.raises(SystemExit):
        cli.main(["up", "--help"])

    words = capsys.readouterr().out
    assert all(name in words for name in ("SLIPWAY_DATA_DIR", "DATABASE_URL", "REDIS_URL"))
