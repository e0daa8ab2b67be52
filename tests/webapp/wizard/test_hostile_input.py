"""What people paste and scripts send: every form refuses in words, none ever breaks."""

import json
from itertools import groupby, product
from operator import itemgetter

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from tests.plugins.extent import sample
from tests.webapp.conftest import client_of
from webapp.modelhub.models import TeamModel, demo_config
from webapp.wizard.drafts import draft_begin

pytestmark = pytest.mark.django_db(databases="__all__")
CONFIG = demo_config()


def changed(**fields) -> str:
    return json.dumps({**CONFIG, **fields})


BROKEN = {
    "no hidden size": changed(hidden_size=None),
    "text for a number": changed(hidden_size="many"),
    "list for a number": changed(num_hidden_layers=[1, 2]),
    "object for a number": changed(vocab_size={"a": 1}),
    "truth for a number": changed(num_attention_heads=True),
    "nothing at all": "{}",
    "negative layers": changed(num_hidden_layers=-4),
    "zero heads": changed(num_attention_heads=0),
    "a fraction of a head": changed(num_attention_heads=2.5),
    "a huge number": changed(hidden_size=10**400),
    "a number beyond floats": '{"model_type": "llama", "hidden_size": 1e999}',
    "no number": json.dumps({**CONFIG, "hidden_size": float("nan")}),
    "unknown family": changed(model_type="perceptron"),
    "family that is no text": changed(model_type=7),
    "family that is a list": changed(model_type=["llama"]),
    "deep nesting": "[" * 100_000,
    "deep objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "a number alone": "7",
    "null": "null",
    "text": '"config"',
    "python": str(CONFIG),
    "broken off": changed()[:-5],
    "two objects": changed() * 2,
    "html": "<html><body>404</body></html>",
    "git pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}
STRANGE = {
    "markup in a name": changed(_name_or_path="<img src=x onerror=alert(1)>"),
    "long name": changed(_name_or_path="x" * 4000),
    "object as a name": changed(_name_or_path={"a": [1]}),
    "half a character": changed(_name_or_path="\ud800"),
    "zero byte": changed(_name_or_path="a\x00b"),
    "infinity beside": changed(rope_scaling=None)[:-1] + ', "extra": Infinity}',
    "no number beside": changed()[:-1] + ', "extra": NaN}',
    "unknown fields": changed(**{f"field_{n}": n for n in range(500)}),
    "huge vocabulary": changed(vocab_size=10**9),
    "many layers": changed(num_hidden_layers=10_000),
    "a byte order mark": "\ufeff" + changed(),
    "every field twice": changed()[:-1] + "," + changed()[1:],
}


def test_a_broken_config_is_refused_beside_its_field_and_changes_nothing(walk):
    walker, wrong = walk(), []
    before = walker.plan.draft
    for what, text in BROKEN.items():
        page = walker.press("model", source="config", config=text)
        said = page.context["form"].errors["config"][0].rstrip() if page.context else ""
        if page.status_code != 422 or not said.endswith((".", "}.", ")")):
            wrong.append((what, page.status_code, said))

        upload = SimpleUploadedFile("config.json", text.encode())
        page = walker.press("model", source="config", config_file=upload)
        errors = page.context["form"].errors if page.context else {}
        if page.status_code != 422 or not {"config", "config_file"} & set(errors):
            wrong.append((what, page.status_code, errors))
        if walker.plan.draft != before:
            wrong.append((what, walker.plan.draft))
    assert not wrong, wrong


def test_a_strange_config_is_refused_or_has_all_its_pages(walk):
    for what, text in sample(STRANGE.items(), share=0.4):
        walker = walk()
        answer = walker.press("model", source="config", config=text)
        pages = [walker.page(step) for step in ("goal", "model", "workload", "hardware", "review")]
        assert answer.status_code in {302, 422}, what
        assert [page.status_code for page in pages] == [200] * 5, what
        assert all("<img src=x" not in page.content.decode() for page in pages), what


def test_the_models_page_takes_or_refuses_any_config(alice, client):
    client.force_login(alice)
    wrong = []
    for what, text in (BROKEN | STRANGE).items():
        TeamModel.objects.all().delete()
        answer = client.post("/models/new/", {"name": "mine", "config": text}, follow=True)
        taken = TeamModel.objects.exists()
        if answer.status_code != (200 if taken else 422):
            wrong.append((what, answer.status_code, taken))
    assert not wrong, wrong


def test_a_choice_that_is_none_is_refused(walk):
    walker = walk()
    before = walker.plan.draft
    fields = [
        ("goal", "goal"),
        ("goal", "objective"),
        ("goal", "latency_target"),
        ("model", "source"),
        ("workload", "optimizer"),
        ("hardware", "choice"),
        ("hardware", "device"),
        ("hardware", "pin-weight_dtype"),
        ("hardware", "pin-activation_recomputation"),
    ]
    values = ("nonsense", "<b>", "x" * 5000, "__class__")
    for (step, field), value in sample(product(fields, values), kind=itemgetter(0)):
        page = walker.press(step, **{field: value})
        assert page.status_code == 422, (field, value)
        assert "<b>&" not in page.content.decode(), (field, value)
        assert walker.plan.draft == before, (field, value)


NUMBERS = {
    "serve": {
        "input_tokens": (1, 1_000_000),
        "output_tokens": (1, 1_000_000),
        "concurrency": (1, 100_000),
        "prefix_share_ratio": (0, 99),
    },
    "generate": {
        "batch_size": (1, 100_000),
        "input_tokens": (1, 1_000_000),
        "output_tokens": (1, 1_000_000),
    },
    "finetune": {
        "sequence_length": (8, 1_000_000),
        "global_batch_size": (1, 100_000),
        "lora_rank": (1, 1024),
    },
    "pretrain": {"sequence_length": (8, 1_000_000), "global_batch_size": (1, 100_000)},
    "compress": {"group_size": (8, 4096)},
}
BOUNDS = [(goal, name, *ends) for goal, fields in NUMBERS.items() for name, ends in fields.items()]


def with_goal(walk, goal: str):
    walker = walk()
    walker.press("goal", goal=goal)
    return walker


def test_a_number_has_its_bounds_and_beyond_them_is_refused(walk):
    for goal, name, low, high in sample(BOUNDS, kind=itemgetter(0)):
        walker = with_goal(walk, goal)

        page = walker.press("workload", **{name: low - 1})
        assert page.status_code == 422, name
        assert str(low) in page.context["form"].errors[name][0], name

        page = walker.press("workload", **{name: high + 1})
        assert page.status_code == 422, name
        assert name in page.context["form"].errors, name

        for value in (low, high):
            assert walker.press("workload", **{name: value}).status_code == 302, (name, value)
            assert walker.page("review").status_code == 200, (name, value)


def test_what_is_no_whole_number_is_refused(walk):
    values = ("", "many", "1e999", "NaN", "-0.5", "9" * 5000, "1,5", "0x10")
    pairs = sample(product(BOUNDS[::3], values), kind=itemgetter(0))
    for (goal, name, *_), cases in groupby(pairs, itemgetter(0)):
        walker = with_goal(walk, goal)
        for _, value in cases:
            page = walker.press("workload", **{name: value})
            assert page.status_code == 422, (name, value)
            assert name in page.context["form"].errors, (name, value)


def test_an_impossible_time_budget_is_refused(walk):
    walker = walk()
    for value in ("0", "-1", "inf", "nan", "1e9", "soon"):
        page = walker.press("workload", time_budget_seconds=value)
        assert page.status_code == 422, value
        assert "time_budget_seconds" in page.context["form"].errors


def test_any_number_of_devices_is_answered(walk):
    for devices, nodes in [(1024, 10_000), (1, 10_000), (1024, 1), (7, 3), (0, 1), (1025, 1)]:
        walker = walk("?preset=serve")
        fields = {"choice": "catalog", "device": "h100-sxm5-80gb"}
        answer = walker.press("hardware", **fields, devices_per_node=devices, nodes=nodes)
        assert answer.status_code == (302 if 1 <= devices <= 1024 else 422), (devices, nodes)
        assert walker.page("review").status_code == 200, (devices, nodes)


PINS = [
    {"pin-weight_dtype": "fp8"},
    {"pin-weight_dtype": "nf4"},
    {"pin-tensor_parallel_size": "1024"},
    {"pin-pipeline_parallel_size": "1000"},
    {"pin-micro_batch_size": "100000"},
    {"pin-kv_cache_dtype": "int8", "pin-weight_dtype": "int4"},
    {"pin-activation_recomputation": "full"},
]
NO_PIN = dict.fromkeys((name for pins in PINS for name in pins), "")


def test_any_pin_is_planned_or_refused_in_words(walk):
    goals = ["serve", "generate", "finetune", "pretrain", "compress"]
    pairs = sample(product(goals, PINS), kind=itemgetter(0))
    for goal, cases in groupby(pairs, itemgetter(0)):
        walker = with_goal(walk, goal)

        for _, pins in cases:
            answer = walker.press("hardware", **{**NO_PIN, **pins})
            verdict = walker.page("review").context["verdict"]

            assert answer.status_code == 302, pins
            assert verdict.sentence, (goal, pins)
            assert verdict.state != "incomplete" or verdict.detail, (goal, pins)


def test_a_suggestion_that_is_none_is_refused_in_words_on_a_step_that_exists(walk):
    walker = walk()
    url = f"/plans/{walker.plan_id}/suggestion/"
    for suggestion in ("", "-1", "99", "x", "²", "9" * 5000, "1.0"):
        page = walker.client.post(url, {"suggestion": suggestion, "step": "goal"}, follow=True)
        assert page.status_code == 200, suggestion
        assert "older verdict" in page.content.decode(), suggestion
    for step in ("", "price", "../../jobs", "review/../goal"):
        answer = walker.client.post(url, {"step": step})
        assert answer["Location"] == walker.url("review"), step


def test_every_button_leads_to_a_step(walk):
    walker = walk()
    for go in ("", "sideways", "<script>", "next", "back", "stay"):
        location = walker.press("model", go=go)["Location"]
        assert location.startswith(f"/plans/{walker.plan_id}/edit/"), go


def test_any_preset_begins_a_plan_but_for_a_model_that_is_none(walk):
    for preset in ("", "demo", "serve", "quantize"):
        assert walk(f"?preset={preset}").page("review").status_code == 200, preset
    client = walk().client
    for preset in ("nonsense", "<b>"):
        assert client.get("/plans/new/", {"preset": preset}).status_code == 400, preset
    for model in ("nothing", "../1", "x" * 300):
        assert client.get(f"/plans/new/?preset=quantize&model={model}").status_code == 404, model


def test_a_folder_of_any_name_is_planned(walk):
    for path in ("tiny", "a/b/c", "größe", "with space", "x" * 400, "/models/x"):
        walker = walk()
        answer = walker.press("model", source="folder", path=path, folder_config=changed())
        assert answer.status_code == 302, path
        assert walker.page("review").status_code == 200, path


# A config.json that is meant to break its reader: refused in words, and soon


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
HOSTILE = {
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "deep inside": json.dumps(LLAMA)[:-1] + ', "x": ' + "[" * 5000 + "]" * 5000 + "}",
    "long": '{"a": "' + "x" * 300_000 + '"}',
    "no end": '{"a": "',
    "many digits": json.dumps(LLAMA).replace("64", "9" * 5000),
    "many layers": json.dumps(LLAMA | {"num_hidden_layers": 10**12}),
    "wide": json.dumps(LLAMA | {"hidden_size": 10**15}),
    "many experts": json.dumps(LLAMA | {"model_type": "mixtral", "num_local_experts": 10**12}),
    "negative": json.dumps(LLAMA | {"vocab_size": -1}),
    "infinite": json.dumps(LLAMA).replace("512", "1e999"),
    "no object": "[1, 2]",
}


def post(user, plan, text: str):
    """Send the model step with a pasted config."""
    sent = {"source": "config", "config": text, "catalog_id": "meta-llama/Llama-3.1-8B"}
    return client_of(user).post(f"/plans/{plan.pk}/edit/model/", sent)


@pytest.fixture
def plan(team, alice):
    return draft_begin(team=team, owner=alice, preset="serve", model=None)


def test_a_hostile_config_is_refused_in_words(plan, alice):
    for what, text in HOSTILE.items():
        answer = post(alice, plan, text)
        assert answer.status_code == 422, what
        assert b"Traceback" not in answer.content, what

    answer = post(alice, plan, json.dumps(LLAMA))
    assert answer.status_code == 302
