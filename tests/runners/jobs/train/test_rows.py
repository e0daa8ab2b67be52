"""A file in tokens, its rows and their order: nothing is lost or told twice."""

import io
import itertools
import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from runners.datasets.conversations import ChatSample, Turn
from runners.jobs.corpus import Corpus, Document, demo_tokenizer
from runners.jobs.generate.answering import TextPrompt, tokenise_prompts
from runners.jobs.loading import LoadedModel, fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.text import RequestTokenizer
from runners.jobs.train.rows import (
    IGNORED,
    DataBatches,
    Rows,
    TextBatches,
    WeightedRows,
    best_fit,
    rows_of,
    segments_of,
    windows_of,
    with_growing_lengths,
)
from runners.jobs.train.tokenised_samples import (
    DEFAULT_TEMPLATE,
    DataFile,
    Documents,
    Renderer,
    set_default_template,
    tokenised_file,
)
from runners.jobspec import GenerateSpec, InlinePrompts, SampleOptions
from runners.jobspec.base import FileData
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY, TINY_CONFIG, tiny_training

PADDED, PACKED = SampleOptions(rows="padded"), SampleOptions()
LEFT_OUT = SampleOptions(too_long="leave_out")


def documents(*lengths, learnt_from=0):
    """Return samples of these many tokens, numbered through."""
    ids = np.arange(sum(lengths) + 1, dtype=np.int32) % 500
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    learnt = np.zeros(len(ids), dtype=np.uint8)
    for begin, end in itertools.pairwise(offsets):
        learnt[begin + learnt_from : end] = 1
    return Documents(ids, learnt, offsets)


def batches(found, options=PACKED, longest=16, **changes):
    fields = {"sequence_length": longest, "micro_batch_size": 2, "samples": options, **changes}
    pieces = segments_of(found, longest, options, is_text=False)
    rows = rows_of(found, pieces, longest, options)
    return DataBatches([WeightedRows(rows)], tiny_training(**fields), 0)


def test_a_long_text_is_cut_so_that_each_token_is_one_label():
    found = documents(40, 5)
    pieces = segments_of(found, 16, PACKED, is_text=True)
    labels = [range(b + 1, b + 1 + n) for b, n in zip(*pieces[:2], strict=True)]
    assert [len(each) for each in labels] == [16, 16, 7, 4]
    assert [at for each in labels for at in each] == [*range(1, 40), *range(41, 45)]
    assert pieces.num_cut == 1


def test_what_is_too_long_is_cut_or_left_out():
    late = segments_of(documents(40, 9, learnt_from=20), 16, PACKED, is_text=False)
    early = segments_of(documents(40, 9, learnt_from=5), 16, PACKED, is_text=False)
    assert (late.lengths.tolist(), late.num_cut, late.num_left_out) == ([], 1, 2)
    assert (early.lengths.tolist(), early.num_cut, early.num_left_out) == ([16, 8], 1, 0)

    pieces = segments_of(documents(40, 17, 18), 16, LEFT_OUT, is_text=True)
    assert (pieces.lengths.tolist(), pieces.num_left_out, pieces.num_cut) == ([16], 2, 0)

    found, pieces = windows_of(np.arange(40, dtype=np.int32), 16)
    assert pieces.begins.tolist() == [0, 16]
    assert len(Rows(found, pieces, [[0], [1]])) == 2


def test_best_fit_loses_nothing_and_overfills_nothing():
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(1, 65, 400).tolist()
        rows = best_fit(lengths, 64)
        assert sorted(each for row in rows for each in row) == list(range(400)), seed
        assert all(sum(lengths[each] for each in row) <= 64 for row in rows), seed
        assert len(rows) <= 11 / 9 * np.ceil(sum(lengths) / 64) + 1, seed


def test_labels_are_the_learnt_tokens_that_follow_and_padding_is_none():
    batch = batches(documents(10, learnt_from=6), PADDED).micro_batch(0, 0)
    assert batch.input_ids[0].tolist() == list(range(9))
    assert batch.labels[0].tolist() == [IGNORED] * 5 + [6, 7, 8, 9]
    assert batch.position_ids is None

    found = batches(documents(17, 9), PADDED)
    batch = found.micro_batch(0, 0)
    assert batch.input_ids.shape == (2, 16)
    assert batch.num_labels == found.num_tokens(0, 0) == 24
    assert found.shares() == (0.25, 1.0)


def test_an_epoch_has_every_label_once_in_an_order_of_the_seed():
    for options in (PADDED, PACKED):
        found = documents(*range(2, 18))

        first, again, other = (batches(found, options, seed=seed) for seed in (1, 1, 2))

        count = len(first._rows[0])
        labels = [
            token
            for row in range(0, count, 2)
            for token in first.micro_batch(row // 2, 0).labels.flatten().tolist()
            if token != IGNORED
        ]
        starts = set(found.offsets.tolist())
        if count % 2 == 0:
            assert sorted(labels) == [at for at in range(found.offsets[-1]) if at not in starts]
        assert torch.equal(first.micro_batch(5, 0).input_ids, again.micro_batch(5, 0).input_ids), (
            options
        )
        assert any(
            first.micro_batch(step, 0).input_ids.tolist()
            != other.micro_batch(step, 0).input_ids.tolist()
            for step in range(3)
        ), options


def test_of_two_sources_each_block_has_its_share():
    spec = tiny_training(sequence_length=16, micro_batch_size=4, samples=PADDED)
    streams = []
    for at, weight in enumerate((0.75, 0.25)):
        ids = np.full(100, at, dtype=np.int32)
        found, pieces = windows_of(ids, 16)
        streams.append(WeightedRows(rows_of(found, pieces, 16, PADDED), weight))
    mixed = DataBatches(streams, spec, 9)

    drawn = torch.cat([mixed.micro_batch(step, 0).input_ids[:, 0] for step in range(256)])

    assert drawn.float().mean() == pytest.approx(0.25, abs=1e-3)
    assert 0 < drawn[:64].sum() < 64


def test_a_source_of_next_to_no_weight_is_refused():
    found, pieces = windows_of(np.arange(40, dtype=np.int32), 16)
    rows = rows_of(found, pieces, 16, PADDED)
    with pytest.raises(BadInputError, match="leave the source out, or give it more"):
        DataBatches([WeightedRows(rows, 0.9999), WeightedRows(rows, 0.0001)], tiny_training(), 0)


def test_packed_samples_see_nothing_of_each_other():
    """A CPU trains with eager attention, whose mask must follow the positions as well."""
    for attention in ("eager", "sdpa"):
        torch.manual_seed(3)
        model = fresh_model(TINY_CONFIG, torch.float32).eval()
        model.set_attn_implementation(attention)
        found = documents(7, 6, 4)
        packed = batches(found, PACKED, 16, micro_batch_size=1).micro_batch(0, 0)
        assert packed.position_ids is not None, attention
        assert (packed.position_ids == 0).sum() == 3, attention

        with torch.no_grad():
            together = model(
                packed.input_ids, position_ids=packed.position_ids, use_cache=False
            ).logits[0]
            apart = {
                int(ids[0]): model(ids[None], use_cache=False).logits[0]
                for ids in (torch.arange(0, 6), torch.arange(7, 12), torch.arange(13, 16))
            }

        column = 0
        while column < 14:
            logits = apart[int(packed.input_ids[0, column])]
            assert torch.allclose(together[column : column + len(logits)], logits, atol=1e-5)
            column += len(logits)


def test_packed_and_padded_rows_have_the_same_loss():
    torch.manual_seed(3)
    model = fresh_model(TINY_CONFIG, torch.float32)
    found = documents(7, 6, 4)
    losses = []
    for options, size in ((PACKED, 1), (PADDED, 3)):
        batch = batches(found, options, 16, micro_batch_size=size).micro_batch(0, 0)
        logits = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        losses.append(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED
            ).item()
        )

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_padded_batches_come_in_few_lengths_that_hold_their_rows():
    """For each length that a batch has, libraries make kernels, and keep them."""
    for longest in (3, 16, 100):
        drawn = np.random.default_rng(3).integers(2, longest + 1, size=120)
        found = batches(documents(*drawn.tolist(), longest), PADDED, longest, micro_batch_size=3)

        made = [found.micro_batch(step, 0) for step in range(80)]

        lengths = {batch.input_ids.shape[1] for batch in made}
        assert 1 < len(lengths) <= 8, longest
        assert max(lengths) <= longest, longest
        for step, batch in enumerate(made):
            rows = [found._rows[at].lengths[row] for at, row in found._row_indices(step, 0)]
            assert max(rows) <= batch.input_ids.shape[1] < max(rows) + max(1, longest / 8) + 1
            assert int((batch.labels == IGNORED).sum()) == 3 * batch.input_ids.shape[1] - (
                batch.num_labels
            )


# A file in tokens: what is learnt of it, what is kept back, and what is written where.

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Qwen3 does: an answer is written with its thoughts only while it is the last.
LAST_THINKS = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSING = "{{ raise_exception('no system role here') }}"


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    corpus = Corpus((Document("prose", "Say it, and it is said. " * 50),))

    def make(template=None):
        tokenizer = demo_tokenizer(corpus, 300, cache)
        tokenizer.chat_template = template
        return tokenizer

    return make


def lines(documents):
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


def tokenised(tokenizer, data, cache_dir, name="a.jsonl"):
    file = DataFile(name, io.BytesIO(data))
    return tokenised_file(file, file.digest(), tokenizer, cache_dir)


def samples(tokenizer, documents):
    """Return text and learnt text of each sample."""
    found = []
    for begin, end in itertools.pairwise(documents.offsets):
        ids, learnt = documents.ids[begin:end], documents.learnt[begin:end] > 0
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[learnt])))
    return found


QUESTIONS = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(40)]


def test_of_an_instruction_only_the_answer_is_learnt(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(PLAIN)
    found = tokenised(tokenizer, lines(QUESTIONS), tmp_path)
    end = tokenizer.eos_token
    assert dict(samples(tokenizer, found.train)) | dict(samples(tokenizer, found.held_out)) == {
        f"[user]Say {n}.{end}[assistant]It is {n}.{end}": f"It is {n}.{end}" for n in range(40)
    }
    assert found.facts["is_template_ours"] is False


def test_a_tokenizer_without_a_template_is_given_ours_and_keeps_it(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()

    found = tokenised(tokenizer, lines(QUESTIONS), tmp_path)

    text, learnt = samples(tokenizer, found.train)[0]
    end = tokenizer.eos_token
    assert text.startswith("<|im_start|>user\nSay ")
    assert learnt.startswith("It is ")
    assert learnt.endswith(f"<|im_end|>{end}")
    assert found.facts["is_template_ours"] is True
    assert tokenizer.chat_template == DEFAULT_TEMPLATE


def test_a_text_that_begins_with_bos_already_has_one_and_is_counted(make_job, tmp_path, capsys):
    tokenizer = adding_bos()
    bos = tokenizer.bos_token_id
    for documents, expected in (
        ([{"text": f"<s>user {n}"} for n in range(20)], 20),
        ([{"prompt": f"<s>user {n}", "completion": " hi"} for n in range(20)], 20),
        ([{"text": f"user {n}"} for n in range(20)], 0),
    ):
        found = tokenised(tokenizer, lines(documents), tmp_path)
        ids, learnt = (getattr(found.train, name)[: found.train.offsets[1]] for name in
                       ("ids", "learnt"))  # fmt: skip
        assert (ids[0], learnt[0]) == (bos, 0), documents[0]
        assert bos not in ids[1:], documents[0]
        assert found.facts["num_repeated_bos"] == expected, documents[0]
    requests = RequestTokenizer(tokenizer)
    assert requests.prompt_ids("<s><s>user") == requests.prompt_ids("user")

    job, source = make_job(GenerateSpec(model=TINY)), InlinePrompts(texts=("a",))
    loaded = LoadedModel(None, tokenizer, torch.device("cpu"))
    texts = [TextPrompt("1", "<s>user"), TextPrompt("2", "user")]
    prompts = tokenise_prompts(job, loaded, source, texts, ())
    assert prompts[0].ids == prompts[1].ids
    assert "1 prompts begin with <s> already, which the tokenizer adds" in capsys.readouterr().out


def adding_bos():
    """Return a byte-level tokenizer that writes ``<s>`` before each text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>", "<pad>"]
    bpe.train_from_iterator(
        ["user hi"], trainers.BpeTrainer(vocab_size=300, special_tokens=specials,
                                         initial_alphabet=alphabet)
    )  # fmt: skip
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def test_a_completion_is_learnt_with_its_end_and_a_text_whole(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token
    asked = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(4)]

    completions = tokenised(tokenizer, lines(asked), tmp_path)
    texts = tokenised(tokenizer, lines([{"text": "one"}, {"text": "two"}]), tmp_path)

    text, learnt = samples(tokenizer, completions.train)[0]
    assert text.endswith(learnt)
    assert learnt.strip()[0].isdigit()
    assert learnt.endswith(end)
    assert {each for part in texts[:2] for each in samples(tokenizer, part)} == {
        (f"one{end}", f"one{end}"),
        (f"two{end}", f"two{end}"),
    }


def test_what_is_held_out_is_in_no_training_sample_however_often_it_stands(
    make_tokenizer, tmp_path
):
    tokenizer = make_tokenizer(PLAIN)
    found = tokenised(tokenizer, lines(QUESTIONS * 2), tmp_path)
    train, held_out = (set(samples(tokenizer, part)) for part in found[:2])
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 40
    assert len(found.train) + len(found.held_out) == 80


def test_two_records_are_one_to_learn_and_one_to_judge_by(make_tokenizer, tmp_path):
    for pair in range(20):  # whichever of them their hashes would keep
        data = lines(QUESTIONS[2 * pair : 2 * pair + 2])
        found = tokenised(make_tokenizer(PLAIN), data, tmp_path)
        assert (len(found.train), len(found.held_out)) == (1, 1)


def test_a_file_is_tokenised_once(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(PLAIN)
    first = tokenised(tokenizer, lines(QUESTIONS), tmp_path)
    [folder] = tmp_path.iterdir()
    changed = first.train.ids[::-1].copy()
    (folder / "train" / "ids").write_bytes(changed.tobytes())

    again = tokenised(tokenizer, lines(QUESTIONS), tmp_path)
    other = tokenised(make_tokenizer(), lines(QUESTIONS), tmp_path)

    assert np.array_equal(again.train.ids, changed)
    assert len(list(tmp_path.iterdir())) == 2  # another template is another text
    assert len(other.train) == len(first.train)


def test_every_answer_is_learnt_unless_later_turns_rewrite_it(make_tokenizer):
    renderer = Renderer(make_tokenizer(LAST_THINKS))
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]
    found = renderer.render(ChatSample(tuple(turns)), "a.jsonl: line 1")
    [(begin, end)] = found.spans
    assert found.text[begin:end] == "<think></think>d"
    assert renderer.num_last_only == 1

    tokenizer = make_tokenizer()
    set_default_template(tokenizer)
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]
    found = Renderer(tokenizer).render(ChatSample(tuple(turns)), "")
    said = [found.text[begin:end] for begin, end in found.spans]
    assert said == [f"{answer}<|im_end|>{tokenizer.eos_token}" for answer in "bd"]


TOOLS = (
    "{% for t in tools or [] %}[tool {{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<call {{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}>{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DROPS_SYSTEM = PLAIN.replace(
    "[{{ m['role'] }}]{{", "[{{ m['role'] }}]{{ '' if m['role'] == 'system' else"
)


def test_answers_of_weight_0_are_read_but_not_learnt(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(PLAIN)
    asked = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "WRONG", "weight": 0}, {"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "right"}]}
        for n in range(2)
    ]  # fmt: skip
    found = tokenised(tokenizer, lines(asked), tmp_path)
    for text, learnt in samples(tokenizer, found.train):
        assert "WRONG" in text
        assert learnt == f"right{tokenizer.eos_token}"
    assert found.facts["left_out"] == found.facts["not_rendered"] == {}


def test_tool_calls_are_learnt_where_the_template_writes_them_and_refused_elsewhere(
    make_tokenizer, tmp_path
):
    tokenizer = make_tokenizer(TOOLS)
    call = {"type": "function", "function": {"name": "sky", "arguments": '{"in": "Rome"}'}}
    tool = {"type": "function", "function": {"name": "sky", "parameters": {}}}
    asked = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}
        for n in range(2)
    ]  # fmt: skip
    found = tokenised(tokenizer, lines(asked), tmp_path)
    [(text, learnt)] = samples(tokenizer, found.train)
    assert text.startswith("[tool sky][user]")
    assert learnt == f'<call sky {{"in": "Rome"}}>{tokenizer.eos_token}'
    for template, field in ((PLAIN, "tool_calls"), (None, "tool_calls")):
        with pytest.raises(BadInputError, match=rf"line 1: .*template writes no “{field}”"):
            tokenised(make_tokenizer(template), lines(asked), tmp_path)
    without_calls = [{**each, "messages": QUESTION_AND_ANSWER} for each in asked]
    with pytest.raises(BadInputError, match="template writes no “tools”"):
        tokenised(make_tokenizer(PLAIN), lines([*without_calls, *QUESTIONS_AS_CHATS]), tmp_path)


QUESTION_AND_ANSWER = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
QUESTIONS_AS_CHATS = [{"messages": [*QUESTION_AND_ANSWER, *QUESTION_AND_ANSWER]}]


def test_fields_and_turns_that_are_left_out_are_counted(make_tokenizer, tmp_path):
    asked = [{**each, "system": "In French.", "id": n} for n, each in enumerate(QUESTIONS)]
    found = tokenised(make_tokenizer(DROPS_SYSTEM), lines(asked), tmp_path)
    assert found.facts["left_out"] == {"id": 40}
    assert found.facts["not_rendered"] == {"system messages": 40}
    found = tokenised(make_tokenizer(PLAIN), lines(asked), tmp_path)
    assert found.facts["not_rendered"] == {}


def test_a_broken_line_or_a_refusing_template_is_named(make_tokenizer, tmp_path):
    with pytest.raises(BadInputError, match=r"a\.jsonl: line 41: it is not valid JSON"):
        tokenised(make_tokenizer(), lines(QUESTIONS) + b"{oops\n", tmp_path)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("samples-")]
    with pytest.raises(BadInputError, match=r"a\.jsonl: line 1: .*no system role here"):
        tokenised(make_tokenizer(REFUSING), lines(QUESTIONS), tmp_path)


# Lengths that grow: as many tokens in each step, the shares of the schedule, no gap.

IDS = np.tile(np.arange(64, dtype=np.int32), 40)
QUARTERS = ((8, 0.25), (16, 0.25), (32, 0.25), (64, 0.25))


def batches_of(spec):
    return with_growing_lengths(spec, lambda each: TextBatches(IDS, each))


def test_each_step_has_as_many_tokens_in_longer_and_longer_rows():
    batches = batches_of(tiny_training(max_steps=8, length_schedule=QUARTERS))
    shapes = [tuple(batches.micro_batch(step, 0).input_ids.shape) for step in range(9)]
    assert shapes[:8:2] == shapes[1:8:2] == [(32, 8), (16, 16), (8, 32), (4, 64)]
    assert shapes[8] == (4, 64)
    assert batches_of(tiny_training()).micro_batch(0, 0).input_ids.shape == (4, 64)


def test_a_schedule_that_does_not_fit_is_refused_by_name():
    for changes, words in (
        ({"data": FileData(path="a.txt")}, "rows of files are fixed; choose data host"),
        ({"max_steps": None, "time_budget_seconds": 9.0}, "set max_steps"),
        (
            {"length_schedule": ((64, 0.5), (32, 0.5))},
            r"goes \[64, 32\]; each length must be above",
        ),
        ({"length_schedule": ((16, 0.5), (32, 0.5))}, "the last one sequence_length, 64"),
        ({"length_schedule": ((16, 0.5), (64, 0.4))}, "must add up to 1"),
        (
            {"length_schedule": ((24, 0.5), (64, 0.5))},
            "256 tokens, which is not a multiple of the length 24",
        ),
    ):
        with refused(ValidationError, words, (changes, words)):
            tiny_training(**{"length_schedule": QUARTERS, **changes})
