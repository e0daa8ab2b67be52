"""Techniques write what plain greedy generation writes, and say what they did."""

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from runners.jobs.generate.continuous import Pages
from runners.jobs.generate.speculative import check_draft
from runners.jobs.runtime import BadInputError
from runners.jobspec import DemoModel, GenerateSpec, PromptLookup


@pytest.mark.parametrize("batching", ["packed", "continuous"])
def test_eager_attention_is_refused_where_batches_have_their_own(batching):
    with pytest.raises(ValidationError, match=f"batching {batching} attends with kernels"):
        GenerateSpec(model=DemoModel(), batching=batching, attention="eager")


def tokenizer_of(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: at for at, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, words[0])))


def test_a_draft_with_the_same_tokenizer_may_guess():
    check_draft(tokenizer_of("a", "b"), tokenizer_of("a", "b"))


@pytest.mark.parametrize("draft", [None, tokenizer_of("b", "a")])
def test_a_draft_with_another_tokenizer_is_refused_with_the_way_out(draft):
    with pytest.raises(BadInputError, match=r"another tokenizer.*or prompt lookup"):
        check_draft(tokenizer_of("a", "b"), draft)


@pytest.mark.parametrize("changes", [{"batching": "continuous"}, {"speculation": PromptLookup()}])
def test_a_narrow_cache_is_refused_where_it_does_not_run(changes):
    with pytest.raises(ValidationError, match="kv_cache fp8 runs in padded or packed batches"):
        GenerateSpec.model_validate({"model": DemoModel(), "kv_cache": "fp8", **changes})


@pytest.mark.parametrize(("longest", "blocks"), [(15, 2), (16, 4), (1, 2)])
def test_a_sequence_takes_whole_pages(longest, blocks):
    pages = Pages.of([1, longest], output_tokens=1, batch_size=2)

    assert pages.num_blocks == blocks
