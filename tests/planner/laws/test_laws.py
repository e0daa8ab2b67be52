"""Random valid questions keep the laws; ``python -m tests.planner.laws SEED COUNT`` asks more."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.laws import checkers
from tests.planner.laws.questions import Questions

SEEDS = st.integers(0, 2**32)
few, fewer = settings(max_examples=30), settings(max_examples=5)


def violations(documents, *laws):
    answers = [checkers.estimated(document) for document in documents]
    found = [
        words
        for document, answer in zip(documents, answers, strict=True)
        for checker in checkers.OF_ONE_ANSWER
        if answer is not None
        for words in checker(document, answer)
    ]
    return found + [words for law in laws for words in law(documents, answers)]


@few
@given(seed=SEEDS)
def test_an_answer_fits_within_memory_has_ordered_figures_and_keeps_to_physics(seed):
    assert violations([Questions(seed).estimate()]) == []


@few
@given(seed=SEEDS)
def test_the_more_is_offloaded_the_slower(seed):
    assert violations(Questions(seed).offloads(), checkers.offload_is_no_faster) == []


@few
@given(seed=SEEDS)
def test_a_batch_of_one_takes_the_memory_of_one_caller(seed):
    assert violations(Questions(seed).one_caller(), checkers.one_memory) == []


@few
@given(seed=SEEDS)
def test_the_busiest_rank_holds_whole_sequences(seed):
    assert violations(Questions(seed).batches(), checkers.whole_sequences) == []


@fewer
@given(seed=SEEDS)
def test_a_limit_fits_and_one_step_beyond_does_not(seed):
    assert list(checkers.limit_is_the_limit(Questions(seed).inverse())) == []


@fewer
@given(seed=SEEDS)
def test_every_export_starts_the_devices_of_the_plan(seed):
    questions = Questions(seed)
    assert list(checkers.exports_start_the_plan(questions.plan())) == []
    assert list(checkers.exports_start_the_plan(questions.plan(training=True))) == []
