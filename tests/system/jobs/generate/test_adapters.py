"""A pile of prompts through adapters: each answer is what its merged model writes alone."""

import json

import pytest
from pydantic import ValidationError

from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobspec import (
    FilePrompts,
    FolderModel,
    GenerateSpec,
    InlinePrompts,
    NamedAdapter,
)
from runners.jobspec.generate import StageChain
from tests.runners.jobs.adapter_making import CPU, make_adapter
from tests.system.jobs.generate.reading import outputs

pytestmark = pytest.mark.slow
PROMPTS = ("import os", "def f(", "class A:")
DEFAULTS = {"batch_size": 4, "output_tokens": 8}
ADAPTERS = {"one": {"alpha": 128}, "two": {"rank": 2, "targets": "query_value", "alpha": 64}}


@pytest.fixture(scope="module")
def alone(host, trained):
    """What each merged model, and the base under None, writes by transformers' own generate."""
    base = trained.folder / "output" / "model"
    models = {
        name: make_adapter(base, host.path / "models" / "piles" / name, seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    models[None] = load_folder(base, "fp32", CPU)
    tokenizer = load_tokenizer(base)

    def write(name: str | None, prompt: str) -> str:
        asked = tokenizer(prompt, return_tensors="pt")
        found = models[name].generate(**asked, max_new_tokens=8, do_sample=False)
        return tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)

    return write


def named(*names: str) -> tuple[NamedAdapter, ...]:
    return tuple(
        NamedAdapter(name=each, adapter=FolderModel(path=f"piles/{each}")) for each in names
    )


def pile(host, name: str, lines: list[dict]) -> FilePrompts:
    (host.path / "models" / name).write_text("\n".join(map(json.dumps, lines)))
    return FilePrompts(path=name)


@pytest.mark.equality
@pytest.mark.parametrize("speculation", [None, {"method": "lookup", "tokens": 3}])
def test_each_prompt_goes_through_the_adapter_that_its_line_names(
    host, generate, alone, speculation
):
    asked = [(name, prompt) for prompt in PROMPTS for name in ("one", "two", None)]
    lines = [{"prompt": prompt, "adapter": name} for name, prompt in asked]
    run = generate(
        f"named-{bool(speculation)}",
        prompts=pile(host, "named.jsonl", lines),
        adapters=named("one", "two"),
        speculation=speculation,
    )

    found = outputs(run)

    assert [line["adapter"] for line in found] == [name for name, _ in asked]
    written = [line["text"].removesuffix("<|endoftext|>") for line in found]
    assert written == [alone(name, prompt) for name, prompt in asked]
    answers = {tuple(alone(name, each) for each in PROMPTS) for name in ("one", "two", None)}
    assert len(answers) == 3


@pytest.mark.equality
def test_the_only_adapter_is_for_every_prompt_that_names_none(generate, alone):
    run = generate("only", prompts=InlinePrompts(texts=PROMPTS), adapters=named("two"))

    assert [line["text"] for line in outputs(run)] == [alone("two", each) for each in PROMPTS]
    assert run.metric("held_adapters_bytes")[0] > 0


@pytest.mark.equality
def test_among_several_a_line_that_names_none_is_the_models_own(host, generate, alone):
    prompts = pile(host, "unsaid.jsonl", [{"prompt": PROMPTS[0]}])

    run = generate("unsaid", prompts=prompts, adapters=named("one", "two"))

    assert outputs(run)[0]["text"] == alone(None, PROMPTS[0])


def test_without_adapters_the_outputs_say_nothing_of_them(generate):
    assert "adapter" not in outputs(generate("plain", prompts=InlinePrompts(texts=PROMPTS)))[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("adapters", "line", "message"),
    [
        (("one",), {"adapter": "tow"}, "prompt 1 requests adapter tow, and the job has one"),
        ((), {"adapter": "one"}, "requests adapter one, and the job was given none"),
        (("one",), {"adapter": 3}, 'line 1 has no name in "adapter"'),
    ],
)
def test_an_adapter_that_is_not_there_is_named(host, generate, adapters, line, message):
    prompts = pile(host, "wrong.jsonl", [{"prompt": "x", **line}])

    with pytest.raises(BadInputError, match=message):
        generate("wrong", prompts=prompts, adapters=named(*adapters))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"batching": "packed"},
            "adapters run in padded batches on one device, not with batching",
        ),
        ({"split": StageChain()}, "not with split chain"),
        ({"compiled_step": True}, "not with compiled_step on"),
        ({"adapters": named("one", "one")}, "the name one is given twice"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(trained_model, fields, message):
    with pytest.raises(ValidationError, match=message):
        GenerateSpec(**{"model": trained_model, "adapters": named("one")} | fields)
