"""What a training wrote on the way and which sources it mixes, as its page shows them."""

import re

import pytest

from runners.jobspec import FileData, HostText, MixedData, WeightedData
from tests.webapp.conftest import EXIT_OK, client_of, new_attempt
from webapp.charts.plots import charts_for
from webapp.core.display import whole
from webapp.jobs.generated_texts import LONGEST, MOST_ROWS, samples_of
from webapp.jobs.mixtures import UNKNOWN, mixture_of

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
    assert "empty: the model ended the text" in page(running, alice)


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


def test_what_is_no_sample_is_left_out(running, report, alice):
    for samples in [
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
    ]:
        report(announced(samples))

        assert samples_of(running) is None, samples
        assert 'id="samples-title"' not in page(running, alice), samples


def test_a_finished_training_says_which_weights_stay(running, report, alice):
    rows = [said(10), said(20), said(10, continuation=" a time", is_final=True)]
    report(announced(rows), ("exited", EXIT_OK))
    running.refresh_from_db()

    text = page(running, alice)

    assert text.count("final weights") == 1
    assert [each.is_final for each in samples_of(running).steps] == [True, False, False]
    assert (
        "samples.json" in client_of(alice).get(f"/jobs/{running.pk}/artefacts/").content.decode()
    )


def test_another_attempt_begins_without_samples(running, report):
    report(announced([said(10)]))
    running.current_attempt = new_attempt(running)
    assert samples_of(running) is None


# The sources that a training mixes, as the job's page shows them, fixed and moving.


PARTS = (
    WeightedData(data=HostText(), weight=3.0),
    WeightedData(data=FileData(path="notes/<b>.txt"), weight=1.0),
)


def mixed(job, **changes):
    """Have a job read two sources."""
    data = MixedData(parts=PARTS, **changes)
    job.spec |= {"data": data.model_dump(mode="json")}
    job.save(update_fields=["spec"])


def moved(step, shares, losses, references=(2.5, 2.0)):
    figures = {"weight": shares, "loss": losses, "reference": references}
    values = {
        f"source{at}_{name}": value
        for name, each in figures.items()
        for at, value in enumerate(each, start=1)
    }
    return "metric", {"source": "job", "values": values, "step": step}


def card(job, user) -> list[list[str]]:
    """Return the cells of the card's rows, as plain text."""
    html = client_of(user).get(f"/jobs/{job.pk}/").content.decode()
    if 'id="mixture-title"' not in html:
        return []
    table = html[html.index('id="mixture-title"') :].partition("<tbody>")[2]
    rows = table.partition("</tbody>")[0].split("</tr>")[:-1]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    return [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in cells]


def test_a_training_on_one_source_has_no_card(running, alice):
    assert card(running, alice) == []
    running.spec |= {"data": {"source": "mixed", "parts": [], "of": "another version"}}
    running.save(update_fields=["spec"])
    assert card(running, alice) == []


def test_fixed_shares_are_shown_as_they_are(running, alice):
    mixed(running)
    rows = card(running, alice)
    assert [row[0::2] for row in rows] == [["1", "75 %"], ["2", "25 %"]]
    assert rows[1][1] == "notes/&lt;b&gt;.txt"


def test_the_shares_in_force_stand_beside_what_they_follow(running, report, alice):
    mixed(running, weights="dynamic", update_every_steps=20)
    begun = card(running, alice)
    assert [row[3:] for row in begun] == [[UNKNOWN] * 3] * 2

    report(moved(0, (0.7, 0.3), (2.5, 4.0)), moved(20, (0.4, 0.6), (2.25, 3.0)))

    rows = card(running, alice)
    assert [row[2:] for row in rows] == [
        ["75 %", "40 %", "2.250", "2.500"],
        ["25 %", "60 %", "3.000", "2.000"],
    ]
    text = client_of(alice).get(f"/jobs/{running.pk}/").content.decode()
    assert "moves every 20 steps" in text
    assert "Share of rows from source 2" in text
    told = client_of(alice).get(f"/jobs/{running.pk}/metrics/").content.decode()
    assert "Held-out loss on source 1" in told
    assert "Reference loss of source 2" in told


def test_after_a_restart_the_attempt_before_speaks_until_the_weights_move(running, report):
    mixed(running, weights="dynamic")
    report(moved(0, (0.7, 0.3), (2.5, 4.0)))
    running.current_attempt = new_attempt(running)
    found = mixture_of(running)
    assert found is not None
    assert [each.loss for each in found.rows] == ["2.500", "4.000"]


def test_sources_are_charted_in_the_order_of_their_numbers():
    metrics = [f"source{at}_{name}" for at in (10, 2, 1) for name in ("loss", "weight")]
    few, all_ = (charts_for("train", metrics, is_complete=each) for each in (False, True))
    assert [each.key for each in few[-3:]] == [f"source{at}_weight" for at in (1, 2, 10)]
    assert [each.title for each in all_[-3:]] == [
        f"Held-out loss on source {at}" for at in (1, 2, 10)
    ]
    assert len({each.metric for each in all_}) == len(all_)
