"""What a training's weights wrote on the way, as the job's page shows it, whatever a host says."""

import re

import pytest

from tests.webapp.conftest import EXIT_OK, client_of, new_attempt
from webapp.core.units import whole
from webapp.jobs.training_page import LONGEST, MOST_ROWS, samples_of

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])

HOW = "at most 8 tokens, the likeliest token each time, by the weights after the step"


def announced(samples: object, **facts: object) -> tuple[str, dict]:
    document = {"samples": samples, "how": HOW, **facts}
    return "artefact", {
        "name": "samples", "kind": "report", "total_bytes": 2, "files": {"samples.json": 2},
        "sha256": {"samples.json": "a" * 64}, "facts": document,
    }  # fmt: skip


def said(step: object, prompt: object = "Once", continuation: object = " upon", **more: object):
    return {"step": step, "prompt": prompt, "continuation": continuation, **more}


def page(job, user, *, is_live: bool = False) -> str:
    headers = {"HX-Request": "true"} if is_live else {}
    return client_of(user).get(f"/jobs/{job.pk}/", headers=headers).content.decode()


def test_a_running_training_shows_step_prompt_and_continuation_newest_first(
    running, report, alice
):
    assert 'id="samples-title"' not in page(running, alice)
    report(announced([said(100), said(1200, "Twice", " over\nand over")]))

    for is_live in (False, True):
        text = page(running, alice, is_live=is_live)
        card = text[text.index('id="samples-title"') :]
        assert card.index(whole(1200)) < card.index("Twice") < card.index("Once")
        assert '<p class="written"><b>Twice</b> over\nand over</p>' in card
        assert HOW in card
    report(announced([said(100), said(1200), said(1300, continuation="")]))
    assert "nothing: the text ended there" in page(running, alice)


def test_prompts_of_a_step_stand_below_it_in_their_order(running, report):
    report(announced([said(20, "a"), said(20, "b"), said(40, "a"), said(40, "b"), said(40, "c")]))

    found = samples_of(running)

    assert [(each.step, [sample.prompt for sample in each.samples]) for each in found.steps] == [
        (40, ["a", "b", "c"]),
        (20, ["a", "b"]),
    ]


def test_many_empty_lines_are_counted_and_few_are_shown(running, report):
    report(
        announced([said(1, "a", "\n" * 48), said(1, "b", "x\n\n\ny"), said(1, "c", "\n\n\n\nz")])
    )

    (step,) = samples_of(running).steps

    assert [each.continuation for each in step.samples] == [
        "\n↵ \N{MULTIPLICATION SIGN} 48\n",
        "x\n\n\ny",
        "\n↵ \N{MULTIPLICATION SIGN} 4\nz",
    ]


def test_text_is_shown_as_text(running, report, alice):
    script = "<script>alert(1)</script>"
    report(announced([said(1, script, f"{script}\u202e\x00{{{{ 7 }}}}")], how=script))

    text = page(running, alice)

    assert script not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3
    assert "{{ 7 }}" in text


def test_a_long_text_is_cut_and_many_rows_keep_the_newest(running, report, alice):
    report(announced([said(step, "p" * 5000) for step in range(1, 200)]))

    found = samples_of(running)

    assert found is not None
    assert [each.step for each in found.steps] == list(range(199, 199 - MOST_ROWS, -1))
    assert found.steps[0].samples[0].prompt == "p" * LONGEST + "\N{HORIZONTAL ELLIPSIS}"
    assert re.search(r"p{2000}…</b>", page(running, alice))


@pytest.mark.parametrize(
    "samples",
    [
        None,
        "text",
        7,
        {},
        [],
        [None],
        [[1]],
        [said("1")],
        [said(True)],
        [said(1, 2)],
        [{"step": 1}],
    ],
)
def test_what_is_no_sample_is_left_out(running, report, alice, samples):
    report(announced(samples))

    assert samples_of(running) is None
    assert 'id="samples-title"' not in page(running, alice)


def test_a_finished_training_says_which_weights_stay(running, report, alice):
    rows = [said(10), said(20), said(10, continuation=" a time", is_final=True)]
    report(announced(rows), ("exited", EXIT_OK))
    running.refresh_from_db()

    text = page(running, alice)

    assert text.count("the weights it leaves") == 1
    assert [each.is_final for each in samples_of(running).steps] == [True, False, False]
    assert (
        "samples.json" in client_of(alice).get(f"/jobs/{running.pk}/artefacts/").content.decode()
    )


def test_another_attempt_begins_without_samples(running, report):
    report(announced([said(10)]))
    running.current_attempt = new_attempt(running)

    assert samples_of(running) is None
