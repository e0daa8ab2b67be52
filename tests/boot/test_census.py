from webapp.boot import census


def tree(tmp_path, files: dict[str, str]) -> census.Census:
    """A census of the given files."""
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return census.Census(tmp_path, tuple(files))


def test_generated_migrations_are_not_counted_as_code(tmp_path):
    taken = tree(tmp_path, {"webapp/a/migrations/0001.py": "", "webapp/a/models.py": ""})

    assert "webapp/a/models.py" in taken.code
    assert "webapp/a/migrations/0001.py" not in taken.code


def test_helpers_of_tests_are_not_counted_as_tests(tmp_path):
    taken = tree(
        tmp_path, {"tests/test_a.py": "def test_one():\n    pass\ndef help():\n    pass\n"}
    )

    assert [found.name for found in taken.test_functions] == ["test_one"]


def test_a_function_s_length_is_from_its_first_line_to_its_last(tmp_path):
    taken = tree(tmp_path, {"webapp/a.py": "@decorator\ndef f():\n    a = 1\n    return a\n"})

    (found,) = taken.functions(["webapp/a.py"])

    assert (found.line, found.num_lines) == (2, 3)


def test_methods_and_nested_functions_are_found(tmp_path):
    source = "class C:\n    def method(self):\n        def inner(): ...\n"
    taken = tree(tmp_path, {"webapp/a.py": source})

    assert {found.name for found in taken.functions(["webapp/a.py"])} == {"method", "inner"}


def test_blank_lines_and_comments_are_neither_code_nor_tests(tmp_path):
    filled = "def test_f():\n    assert True  # counts\n"
    files = {"manage.py": filled, "tests/test_a.py": f"# about\n\n\n{filled}\n    # why\n"}

    figures = census.report(tree(tmp_path, files))

    assert (figures["code lines"], figures["test lines"]) == (2, 2)
    assert figures["test/code ratio"] == 1.0


def test_the_report_relates_tests_to_code(tmp_path):
    code = "def f(a: int) -> int:\n    return a\n"
    files = {
        "manage.py": code,
        "webapp/a.py": code,
        "tests/test_a.py": "def test_f():\n    pass\n",
    }

    figures = census.report(tree(tmp_path, files))

    assert figures["test/code ratio"] == 0.5
    assert figures["typed functions %"] == 100
    assert figures["test functions"] == 1
