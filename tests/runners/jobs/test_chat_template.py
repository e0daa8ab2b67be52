"""Chat templates as models have them: one that fails is told with its own words, everywhere."""

import pytest

from runners.datasets.conversations import ChatSample, Turn
from runners.jobs.chat_template import TemplateRefusedError, template_fault
from runners.jobs.corpus import Corpus, Document, demo_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.text import RequestTokenizer
from runners.jobs.train.tokenised_samples import Renderer

EACH = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
FAILING = {
    "{{ raise_exception('no system role here') }}": "no system role here",
    "{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}": "TypeError: can only concatenate",
    "{% for m in messages": "unexpected end of template",
    "{{ messages[9]['content'].strip() }}": "UndefinedError",
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{{ {}.missing.field }}": "UndefinedError",
}
NAMED = {"tool_use": EACH, "rag": EACH}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    corpus = Corpus((Document("prose", "Say it, and it is said. " * 50),))
    return demo_tokenizer(corpus, 300, tmp_path_factory.mktemp("cache"))


def test_a_template_that_fails_is_told_by_endpoint_and_training_with_its_words(tokenizer):
    chat = ChatSample((Turn("user", "a"), Turn("assistant", "b")))
    for template, words in (*FAILING.items(), (NAMED, "no default specified")):
        tokenizer.chat_template = template

        with pytest.raises(TemplateRefusedError) as asked:
            RequestTokenizer(tokenizer).chat_ids([{"role": "user", "content": "a"}])
        with pytest.raises(BadInputError) as trained:
            Renderer(tokenizer).render(chat, "a.jsonl: line 1")

        assert words in str(asked.value), template
        assert str(trained.value).startswith("a.jsonl: line 1: "), template
        assert words in str(trained.value), template
        assert words in template_fault(RequestTokenizer(tokenizer).chat_ids), template


def test_only_a_template_that_renders_nothing_is_told_at_the_start(tokenizer):
    asking = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a') }}{% endif %}"
    for template in (None, EACH, asking, NAMED | {"default": EACH}):
        tokenizer.chat_template = template
        assert template_fault(RequestTokenizer(tokenizer).chat_ids) == "", template
