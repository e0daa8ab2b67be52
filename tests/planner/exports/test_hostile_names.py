"""Names that a shell, YAML or DNS could misread arrive as they are and never run as commands."""

import ast
import json
import math
import os
import re
import string
import subprocess
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.exports.export import shell_lines, with_header
from planner.exports.kubernetes import MAX_NAME, object_name
from planner.exports.registry import export
from planner.exports.yaml_text import yaml_text
from tests.planner.exports.making import made, trained

HOSTILE = [
    "folder with spaces/model", "it's/ours", 'say "hello"/model', "a;touch taken",
    "a|touch taken&", "a`touch taken`", "a\\b/c*?[x]", "~/model", "#no/comment",
]  # fmt: skip
# What a model's folder may be called, except what shells expand on purpose here.
NAMES = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_characters="$"), min_size=1
)
SHOWS = "#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def started(tmp_path, text, tool):
    """Return the words that a tool is started with when bash runs a script."""
    stub = tmp_path / tool
    stub.write_text(SHOWS)
    stub.chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", text],
        env={"PATH": path, "HOME": "/nobody"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not (tmp_path / "taken").exists()
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_models_name_reaches_vllm_as_one_word(tmp_path, name):
    text = export("vllm", replace(made(), model=name)).text
    words = started(tmp_path, text, "vllm")
    assert words[:3] == ["serve", name, "--dtype"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_models_name_reaches_a_training_script_to_the_letter(tmp_path, name):
    text = export("torchrun", replace(trained(), model=name)).text
    (tmp_path / "torchrun").write_text("#!/bin/sh\n")
    (tmp_path / "torchrun").chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"

    subprocess.run(["bash", "-euc", text], env={"PATH": path}, cwd=tmp_path, check=True)

    module = ast.parse((tmp_path / "train.py").read_text())
    calls = [one for one in ast.walk(module) if isinstance(one, ast.Call)]
    plan = next(one for one in calls if ast.unparse(one.func) == "json.loads")
    assert json.loads(ast.literal_eval(plan.args[0]))["model"] == name
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_draft_models_name_survives_json_inside_of_a_shell_word(tmp_path, name):
    case = made(speculative={"draft_model": name, "tokens": 3})
    words = started(tmp_path, export("vllm", case).text, "vllm")
    setting = json.loads(words[words.index("--speculative-config") + 1])
    assert (setting["model"], setting["num_speculative_tokens"]) == (name, 3)


def test_containers_get_a_models_name_without_a_shell():
    for name in HOSTILE:
        case = replace(made(), model=name)
        service = yaml.safe_load(export("compose", case).text)["services"]["serve"]
        *_, deployment = yaml.safe_load_all(export("kubernetes", case).text)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert service["command"][:3] == container["command"][:3] == ["vllm", "serve", name], name


@pytest.mark.parametrize("name", ["END", "x\nEND\ntouch taken"])
def test_options_written_by_a_script_do_not_end_before_their_end(tmp_path, name):
    case = made(engine="tensorrt_llm", speculative={"draft_model": name, "tokens": 3})
    started(tmp_path, export("tensorrt_llm", case).text, "trtllm-serve")
    written = yaml.safe_load((tmp_path / "trtllm-options.yaml").read_text())
    kept = written["speculative_config"]["speculative_model"]
    assert kept.rstrip("\n") == name


def test_a_name_without_letters_or_too_long_is_still_a_label():
    cut_at_the_dash = "0" * (MAX_NAME - 1) + ":0"
    label = object_name(replace(made(), model=cut_at_the_dash))
    assert label == "0" * (MAX_NAME - 1)
    assert object_name(replace(made(), model="org/???")) == "plan"
    label = object_name(replace(made(), model="org/" + "long-" * 40))
    assert label.startswith("long-long-")
    assert len(label) == 52


@settings(max_examples=100, deadline=None)
@given(name=NAMES)
def test_every_name_makes_a_label_that_dns_allows(name):
    label = object_name(replace(made(), model=name))
    assert DNS_LABEL.fullmatch(label)
    assert len(label) <= MAX_NAME <= 63 - len("-0")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(string.printable, max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(string.ascii_letters + " :#-'\"", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(value=JSON)
def test_any_plain_data_survives_being_written_as_yaml(value):
    assert yaml.safe_load(yaml_text(value)) == value


LINES = st.text(st.sampled_from("a \n\t#:-\"'|>\u2028\x85\r\ufeff é🚢"), max_size=12)


@settings(max_examples=300, deadline=None)
@given(text=LINES)
def test_a_text_of_several_lines_keeps_every_blank_and_line_break(text):
    assert yaml.safe_load(yaml_text({"a": text, "b": [text, 1]})) == {"a": text, "b": [text, 1]}


def test_line_breaks_odd_numbers_and_heads_are_written_where_they_belong():
    for text in ("a", "a\n", "a\n\n", "a\nb", "a\nb\n", "a\n\n b\n\n\n"):
        assert yaml.safe_load(yaml_text({"script": text, "next": 1})) == {
            "script": text,
            "next": 1,
        }
    assert yaml_text([math.nan, math.inf, -math.inf]) == "- .nan\n- .inf\n- -.inf\n"
    assert with_header("#!/bin/sh\nrun\n", ["one"], "# ") == "#!/bin/sh\n# one\nrun\n"
    assert with_header("run\n", ["one", "two"], "# ") == "# one\n# two\nrun\n"


@settings(max_examples=200, deadline=None)
@given(value=st.floats(allow_nan=False))
def test_a_float_is_read_back_as_the_same_float(value):
    found = yaml.safe_load(yaml_text({"lr": value}))["lr"]
    assert isinstance(found, float)
    assert found == value


def test_a_word_that_yaml_has_a_meaning_for_stays_a_word():
    cases = (
        "yes", "No", "ON", "off", "null", "~", "1e3", "0x10", "1:30", "2026-11-21", "=", "-", ".5",
        ".inf", "..", ".",
    )  # fmt: skip
    wrong = [
        word
        for word in cases
        if yaml.safe_load(yaml_text({"key": word, word: 1})) != {"key": word, word: 1}
    ]
    assert not wrong, wrong


@settings(max_examples=40, deadline=None)
@given(words=st.lists(NAMES, min_size=1, max_size=8))
def test_a_command_of_any_words_is_split_by_bash_into_the_same_words(words):
    text = shell_lines(["printf", r"%s\0", *words])
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == words


@pytest.mark.parametrize(
    "name",
    [
        "$(touch owned)",
        "`touch owned`",
        "${IFS}touch",
        'a"; touch owned; "',
        "$MASTER_ADDR; touch owned",
        "a\ntouch owned",
        "$NODE_RANK$(touch owned)",
        "back\\slash'quote",
    ],
)
def test_a_hostile_word_reaches_the_program_as_it_is(name, tmp_path):
    script = shell_lines(["printf", "%s", name])
    said = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert said.stdout == name
    assert list(tmp_path.iterdir()) == []


def test_our_own_variables_stay_variables(tmp_path):
    script = shell_lines(["printf", "%s", "tcp://$MASTER_ADDR:29500/$NODE_RANK"])

    said = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "3", "PATH": "/usr/bin:/bin"},
    )

    assert said.stdout == "tcp://10.0.0.1:29500/3"


def test_arguments_stay_apart_and_a_line_break_ends_no_comment():
    script = shell_lines(["printf", "[%s]", "$@"])
    said = subprocess.run(
        ["bash", "-c", script, "script", "a b", "c"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "[a b][c]"
    for end in ("\n", "\r\n", "\r", "\u2028"):
        text = with_header("true\n", [f"card{end}touch owned #, planned for vllm"], "# ")
        assert text == "# card touch owned #, planned for vllm\ntrue\n", end
