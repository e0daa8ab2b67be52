"""What a user can name never becomes a command of an exported script."""

import subprocess

import pytest

from planner.exports.export import shell_lines, with_head


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


def test_further_arguments_of_a_script_stay_apart():
    script = shell_lines(["printf", "[%s]", "$@"])
    said = subprocess.run(
        ["bash", "-c", script, "script", "a b", "c"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "[a b][c]"


def test_a_line_break_in_a_name_does_not_end_the_comment():
    for end in ("\n", "\r\n", "\r", "\u2028"):
        text = with_head("true\n", [f"card{end}touch owned #, planned for vllm"], "# ")
        assert text == "# card touch owned #, planned for vllm\ntrue\n", end
