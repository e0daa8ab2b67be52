"""Many adapters on one base in one batch: each answer is what its merged model writes alone."""

import openai
import pytest
import torch
from pydantic import ValidationError

from runners.jobs.adapters import NONE, MixedAdapters, read_adapter, weights_digest
from runners.jobs.loading import fresh_model, load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.engine import AnswerSequence, EndpointMetrics, Engine, Limits
from runners.jobs.serve.own_backend import load_serving_model
from runners.jobs.serve.padded_decode import Sampling
from runners.jobs.serve.paging import PagedCache, check_paging
from runners.jobs.serve.text import RequestTokenizer
from runners.jobspec import FolderModel, NamedAdapter, ServeSpec
from tests.runners.jobs.adapter_making import CPU, make_adapter, make_all
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.serve.serving import serving

PROMPTS = ["import os", "def f(", "class A:", "return"]
MADE = {
    "one": {},
    "two": {"rank": 2, "alpha": 8},
    "three": {"targets": "query_value", "alpha": 64},
}
TOKENS = 12


@pytest.fixture(scope="module")
def alone(host, base):
    """What each merged model, and the base, writes by transformers' own generate."""
    models = make_all(base, host.path / "models" / "adapters", MADE)
    tokenizer = load_tokenizer(base)

    def write(name: str, prompt: str) -> str:
        asked = tokenizer(prompt, return_tensors="pt")
        found = models[name].generate(**asked, max_new_tokens=TOKENS, do_sample=False)
        answer = found[0, asked["input_ids"].shape[1] :]
        return tokenizer.decode(answer, skip_special_tokens=True)

    return write


@pytest.fixture(scope="module")
def served(host, base, alone):
    model = load_folder(base, "fp32", CPU)
    check_paging(model, PagedCache(8), 512)
    digest = weights_digest(base)
    folders = {name: host.path / "models" / "adapters" / name for name in MADE}
    read = [read_adapter(name, each, model, digest) for name, each in folders.items()]
    return model, MixedAdapters(model, read), RequestTokenizer(load_tokenizer(base))


def mixed_texts(served, asked: list[tuple[int, str]]) -> list[str]:
    """Let the engine write all answers at once, each by its adapter."""
    model, adapters, reader = served
    limits = Limits(16, 16, 64, frozenset({reader.tokenizer.eos_token_id}))
    engine = Engine(model, PagedCache(64), limits, EndpointMetrics(), adapters)
    pieces = [[] for _ in asked]
    wish = Sampling(TOKENS, temperature=0.0)
    engine.submit(
        [
            AnswerSequence(reader.prompt_ids(text), wish, reader.answer(()), own.append, adapter)
            for (adapter, text), own in zip(asked, pieces, strict=True)
        ]
    )
    while not engine.is_idle:
        engine._step()
    return ["".join(piece.text for piece in own) for own in pieces]


@pytest.mark.equality
def test_each_text_of_a_mixed_batch_is_that_of_its_merged_model_alone(served, alone):
    names = [*MADE, "model"]
    asked = [(name, prompt) for prompt in PROMPTS for name in names]

    texts = mixed_texts(
        served, [(NONE if name == "model" else names.index(name), text) for name, text in asked]
    )

    assert texts == [alone(name, prompt) for name, prompt in asked]
    by_name = {name: tuple(texts[at :: len(names)]) for at, name in enumerate(names)}
    assert len(set(by_name.values())) == len(names)  # the adapters really differ


@pytest.mark.equality
def test_few_of_the_adapters_in_a_batch_answer_as_all_do(served, alone):
    texts = mixed_texts(served, [(1, PROMPTS[0]), (NONE, PROMPTS[0])])

    assert texts == [alone("two", PROMPTS[0]), alone("model", PROMPTS[0])]


def test_a_batch_without_adapters_is_the_base_alone(served):
    model, adapters, _reader = served
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    inputs = torch.ones(1, 3, 64)
    plain = inputs @ linear.weight.T

    with adapters.serving(torch.full((1, 3), NONE)), torch.inference_mode():
        assert torch.equal(linear(inputs), plain)
    with adapters.serving(torch.tensor([[0, NONE, 0]])), torch.inference_mode():
        changed = (linear(inputs) != plain).any(dim=-1)
    assert changed.tolist() == [[True, False, True]]


@pytest.fixture(scope="module")
def client(host, trained_model, alone):
    named = [
        NamedAdapter(name=name, adapter=FolderModel(path=f"adapters/{name}")) for name in MADE
    ]
    spec = ServeSpec(model=trained_model, weight_dtype="fp32", adapters=named)
    with serving(host, "serve-adapters", spec) as endpoint:
        endpoint.address()
        yield endpoint.client()


def test_the_official_client_lists_the_adapters_under_their_base(client):
    listed = {each.id: getattr(each, "parent", None) for each in client.models.list().data}

    assert listed == {"model": None, "one": "model", "two": "model", "three": "model"}
    assert client.models.retrieve("two").parent == "model"


def test_a_client_chooses_the_adapter_by_the_models_name(client, alone):
    for name in ("one", "model", "two"):
        found = client.completions.create(
            model=name, prompt=PROMPTS[1], max_tokens=TOKENS, temperature=0
        )

        assert found.choices[0].text == alone(name, PROMPTS[1])
        assert found.model == name


def test_an_unknown_adapter_is_not_found_with_what_there_is(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="four", prompt="a")

    assert caught.value.code == "model_not_found"
    assert "'model' is, with adapters one, two, three" in caught.value.message


def test_two_adapters_never_have_one_name(trained_model):
    named = NamedAdapter(name="model", adapter=FolderModel(path="a"))

    with pytest.raises(ValidationError, match="the name model is given twice"):
        ServeSpec(model=trained_model, adapters=(named,))


def test_an_endpoint_with_an_adapter_of_another_base_is_refused(host, trained_model, make_job):
    torch.manual_seed(3)
    other = host.path / "models" / "other-base"
    fresh_model(TINY_CONFIG, torch.float32).save_pretrained(str(other))
    make_adapter(other, host.path / "models" / "other", seed=9)
    named = NamedAdapter(name="other", adapter=FolderModel(path="other"))
    spec = ServeSpec(model=trained_model, weight_dtype="fp32", adapters=(named,))

    with pytest.raises(BadInputError, match="adapter other was trained on other weights"):
        load_serving_model(make_job(spec), spec, EndpointMetrics())
