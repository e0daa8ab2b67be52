import subprocess
import sys

import pytest

from tests.plugins import changed, reach
from tests.plugins.graph import (
    HARNESS,
    Graph,
    Names,
    is_test_file,
    matches,
    names_in,
    read_files,
    read_graph,
)
from tests.plugins.pieces import parts_of
from tests.plugins.reach import AT_IMPORT, Ran, Record, state_of

SMALL = {
    "planner/__init__.py": "",
    "planner/cost.py": "PRICE = 2\n\ndef cost(n):\n    return n * PRICE\n\ndef weight(n):\n    return n\n",
    "planner/plan.py": "from planner.cost import cost, weight\n\ndef plan(n):\n    return cost(n)\n",
    "planner/data/gpus.toml": "a = 1\n",
    "runners/job.py": "def main():\n    return 1\n",
    "tests/planner/test_cost.py": "from planner.cost import cost\n\ndef test_cost():\n    assert cost(2) == 4\n",
    "tests/planner/test_plan.py": "from planner.plan import plan\n\ndef test_plan():\n    assert plan(2) == 4\n",
    "tests/planner/test_weight.py": "from planner.cost import weight\n\ndef test_weight():\n    assert weight(2) == 2\n",
    "tests/runners/conftest.py": "JOB = ['python', '-m', 'runners.job']\n",
    "tests/runners/test_job.py": "def test_job():\n    pass\n",
    "tests/architecture/test_sizes.py": "def test_sizes():\n    pass\n",
}  # fmt: skip
ALWAYS = "tests/architecture/test_sizes.py"


def graph_of(files: dict[str, str]) -> Graph:
    names = {path: names_in(text) for path, text in files.items() if path.endswith(".py")}
    return Graph(names, files)


def reached(path: str, files: dict[str, str] = SMALL) -> set[str]:
    """The short names of the test files that a change of one file reaches."""
    return {each.rpartition("/")[2] for each in graph_of(files).reached(path)}


def test_a_module_reaches_the_tests_that_import_it_through_others():
    assert reached("planner/plan.py") == {"test_plan.py"}
    assert reached("planner/cost.py") == {"test_cost.py", "test_plan.py", "test_weight.py"}


def test_a_package_is_imported_by_whoever_imports_a_part_of_it():
    assert reached("planner/__init__.py") == {"test_cost.py", "test_plan.py", "test_weight.py"}


def test_a_module_that_a_conftest_starts_as_a_process_reaches_the_tests_below():
    assert reached("runners/job.py") == {"test_job.py"}


def test_a_test_file_reaches_itself():
    assert reached("tests/planner/test_cost.py") == {"test_cost.py"}


def test_data_reaches_those_who_import_the_modules_above_it():
    assert reached("planner/data/gpus.toml") == {"test_cost.py", "test_plan.py", "test_weight.py"}


@pytest.mark.parametrize("path", ["pyproject.toml", "tests/conftest.py", "webapp/boot/hashes.csv"])
def test_what_sets_the_whole_run_up_reaches_everything(path):
    assert len(reached(path)) == 5


def test_a_module_that_nobody_imports_reaches_everything():
    assert len(reached("planner/odd.py", SMALL | {"planner/odd.py": ""})) == 5


def test_a_deleted_module_reaches_those_who_still_name_it():
    files = {path: text for path, text in SMALL.items() if path != "planner/plan.py"}
    names = {path: names_in(text) for path, text in files.items() if path.endswith(".py")}

    assert Graph(names, {*files, "planner/plan.py"}).reached("planner/plan.py") == {
        "tests/planner/test_plan.py"
    }


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import planner.cost", "planner.cost"),
        ("def f():\n    from planner import cost", "planner.cost"),
        ("APPS = ['webapp.jobs']", "webapp.jobs"),
        ("CODE = 'from planner import cost, plan'", "planner.plan"),
        ("argv = ['-m', f'runners.jobs.{kind}']", "runners.jobs."),
        ("argv = ['-m', 'planner']", "planner.__main__"),
    ],
)
def test_modules_are_named_by_imports_and_by_strings(source, name):
    assert name in names_in(source).modules


def test_a_docstring_names_nothing():
    assert names_in('"""See planner.cost and templates/docs/hosts.md."""') == Names(
        frozenset(), frozenset(), frozenset()
    )


def test_a_message_may_name_a_layer_above_which_no_module_uses():
    files = SMALL | {
        "webapp/page.py": "",
        "planner/cost.py": "HELP = 'webapp.page'",
        "tests/webapp/test_page.py": "import webapp.page",
    }

    assert reached("webapp/page.py", files) == {"test_page.py"}


def test_what_the_harness_imports_of_the_product_reaches_everything():
    files = read_files(changed.ROOT)
    harness = {path: files[path].decode() for path in files if matches(path, HARNESS)}
    graph = Graph({path: names_in(text) for path, text in harness.items()}, files)

    for path in harness:
        if path not in ("tests/plugins/changed.py", "tests/plugins/graph.py"):  # names of files
            named = graph.named(graph.names[path], path)
            own = {each for each in named if not each.startswith("tests/")}
            assert own - {"webapp/__init__.py", "webapp/boot/__init__.py"} <= {
                "webapp/boot/tools.py", "webapp/settings.py",
            }  # fmt: skip


# What the record adds


def record_of(files: dict[str, str]) -> Record:
    """A record of the small project's tests, as a whole run would make it."""
    cost, plan = ("planner/cost.py", "cost"), ("planner/plan.py", "plan")
    tests = {
        AT_IMPORT: Ran(),
        "tests/planner/test_cost.py": Ran({cost}),
        "tests/planner/test_plan.py": Ran({cost, plan}, {"planner/data/gpus.toml"}),
        "tests/planner/test_weight.py": Ran({("planner/cost.py", "weight")}),
        "tests/runners/test_job.py": Ran(started=[["runners.job"], [], []]),
        ALWAYS: Ran(),
    }
    return Record(state_of({path: text.encode() for path, text in files.items()}), tests)


def narrowed(changes: dict[str, str], base: dict[str, str] = SMALL, **ran: Ran) -> set[str]:
    """The short names of the test files that changes of the small project reach by the record."""
    now = base | changes
    before, after = ({p: t.encode() for p, t in side.items()} for side in (base, now))
    record = record_of(SMALL)
    record.tests |= {f"tests/planner/{name}.py": seen for name, seen in ran.items()}
    found = changed.narrowed(graph_of(now), record, before, after)
    return {each.rpartition("/")[2] for each in found}


def edited(path: str, old: str, new: str) -> dict[str, str]:
    assert old in SMALL[path]
    return {path: SMALL[path].replace(old, new)}


def test_a_function_reaches_the_tests_that_executed_it():
    assert narrowed(edited("planner/cost.py", "return n\n", "return -n\n")) == {"test_weight.py"}
    assert narrowed(edited("planner/plan.py", "cost(n)\n", "cost(-n)\n")) == {"test_plan.py"}


def test_a_constant_reaches_the_tests_that_executed_what_mentions_it():
    assert narrowed(edited("planner/cost.py", "= 2", "= 3")) == {"test_cost.py", "test_plan.py"}


def test_a_statement_of_a_module_reaches_all_that_import_it():
    more = {"planner/cost.py": SMALL["planner/cost.py"] + "\nprint(PRICE)\n"}

    assert narrowed(more) == {"test_cost.py", "test_plan.py", "test_weight.py"}


def test_a_comment_reaches_nothing():
    assert narrowed({"planner/cost.py": "# words\n" + SMALL["planner/cost.py"]}) == set()


def test_a_new_function_reaches_nobody_before_it_is_called():
    more = {"planner/cost.py": SMALL["planner/cost.py"] + "\ndef new():\n    return 1\n"}

    assert narrowed(more) == set()


def test_a_new_module_reaches_those_that_execute_what_was_changed_to_call_it():
    text = "from planner.new import twice\n" + SMALL["planner/plan.py"].replace(
        "cost(n)", "twice(n)"
    )
    new = {"planner/new.py": "def twice(n):\n    return 2 * n\n", "planner/plan.py": text}

    assert narrowed(new) == {"test_plan.py"}


def test_a_new_module_that_was_imported_before_it_was_there_reaches_all_importers():
    base = SMALL | edited("planner/cost.py", "PRICE = 2", "from planner import new\nPRICE = 2")

    assert "test_weight.py" in narrowed({"planner/new.py": ""}, base)


def test_a_new_method_reaches_all_that_import_the_class():
    base = SMALL | {"planner/cost.py": SMALL["planner/cost.py"] + "class C:\n    x = 1\n"}
    more = {"planner/cost.py": base["planner/cost.py"] + "    def f(self): ...\n"}

    assert "test_weight.py" in narrowed(more, base)


def test_a_process_that_a_test_started_is_judged_by_what_it_imports():
    assert narrowed(edited("runners/job.py", "return 1", "return 2")) == {"test_job.py"}


def test_data_reaches_the_tests_that_opened_it():
    assert narrowed({"planner/data/gpus.toml": "a = 2\n"}) == {"test_plan.py"}


def test_new_data_reaches_all_that_import_the_modules_above_it():
    assert "test_weight.py" in narrowed({"planner/data/more.toml": ""})


def test_a_test_file_without_a_record_is_judged_by_its_imports():
    new = {"tests/planner/test_new.py": "from planner.plan import plan\n"}
    change = edited("planner/cost.py", "return n\n", "return -n\n")

    assert narrowed(change, SMALL | new) == {"test_weight.py", "test_new.py"}


def test_a_record_that_is_older_than_what_a_test_executed_is_not_believed():
    base = SMALL | edited("planner/plan.py", "cost(n)", "cost(n) + weight(n)")
    change = {"planner/cost.py": SMALL["planner/cost.py"].replace("return n\n", "return -n\n")}

    assert narrowed(change, base) == {"test_weight.py", "test_plan.py"}


def test_a_test_file_that_forked_is_judged_by_its_imports():
    change = edited("planner/cost.py", "return n\n", "return -n\n")

    assert narrowed(change, test_cost=Ran(is_whole=False)) == {"test_weight.py", "test_cost.py"}


def test_what_ran_when_tests_were_collected_reaches_all_that_import_it():
    at_import = reach.Record({}, {AT_IMPORT: Ran({("planner/cost.py", "weight")})})
    before = {path: text.encode() for path, text in SMALL.items()}
    now = before | {"planner/cost.py": before["planner/cost.py"].replace(b"n\n\nd", b"-n\n\nd")}
    record = record_of(SMALL)
    record.tests |= at_import.tests
    now["planner/cost.py"] = before["planner/cost.py"].replace(b"return n\n", b"return -n\n")

    assert "tests/planner/test_cost.py" in changed.narrowed(graph_of(SMALL), record, before, now)


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = record_of(SMALL)

    reach.write(tmp_path / "map.gz", record)

    assert reach.read(tmp_path / "map.gz") == record


def test_pieces_of_a_module_change_by_themselves():
    source = (
        "import a\nX = 1\n@d\ndef f(a): return X\nclass C:\n    y = 1\n    def g(self): return 2\n"
    )
    before, after = parts_of(source), parts_of(source.replace("return 2", "return 3"))

    assert {name for name in before if before[name] != after[name]} == {"C.g"}


# The options of pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with the small project, committed."""
    for path, text in SMALL.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)
    return tmp_path


def test_new_deleted_and_edited_files_have_changed_and_others_not(project):
    (project / "planner/new.py").write_text("")
    (project / "planner/plan.py").unlink()
    (project / "planner/cost.py").write_text(SMALL["planner/cost.py"].replace("2", "3"))
    (project / "runners/job.py").write_text("# words\n" + SMALL["runners/job.py"])

    assert changed.changed_paths(project, "HEAD") == [
        "planner/cost.py", "planner/new.py", "planner/plan.py",
    ]  # fmt: skip


def test_an_unknown_revision_is_a_wrong_use(project):
    with pytest.raises(pytest.UsageError, match="nowhere"):
        changed.changed_paths(project, "nowhere")


def test_unreached_files_and_folders_are_left_out_of_the_collection(project):
    graph = read_graph(project)
    found = changed.change(graph, "HEAD", ["planner/plan.py"])

    assert str(found) == "changed since HEAD: 1 files, reach 2 of 5 test files"
    assert found.leaves_out(project / "tests/planner/test_cost.py", project)
    assert found.leaves_out(project / "tests/runners", project)
    assert not found.leaves_out(project / "tests/planner", project)
    assert not found.leaves_out(project / "tests/planner/test_plan.py", project)
    assert not found.leaves_out(project / ALWAYS, project)


def test_names_are_kept_between_runs(project, tmp_path):
    kept = tmp_path / "names.json"

    first = read_graph(project, kept=kept)

    assert kept.exists()
    assert read_graph(project, kept=kept).names == first.names
    assert is_test_file(ALWAYS)
    assert sys.version_info >= (3, 11)  # co_qualname
