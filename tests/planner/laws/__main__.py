"""Send random requests and count violations: ``python -m tests.planner.laws SEED COUNT [PART]``.

A part is ``estimates`` or ``searches``; without one, both are asked. A search takes as long as
hundreds of estimates, so that one part alone asks many questions in the time there is.
"""

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable

from tests.planner.laws import checkers, growth
from tests.planner.laws.questions import Questions, fresh_questions

SHOWN = 3  # violations of a law that are printed


class Tally:
    """The violations found so far, by law; a crash of the planner is one too."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.requests = 0

    def add(self, law: str, documents: object, words: Iterable[str]) -> None:
        for text in words:
            self.counts[law] += 1
            if self.counts[law] <= SHOWN:
                print(f"{law}: {text}\n  {json.dumps(documents)}", flush=True)

    def guarded(self, document: dict, ask: Callable[[dict], object]) -> object:
        self.requests += 1
        try:
            return ask(document)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.add("crash", document, [f"{error!r} in {last.filename}:{last.lineno}"])
            return None

    def checked(self, documents: list[dict]) -> list:
        return [self.guarded(document, self._checked) for document in documents]

    def _checked(self, document: dict) -> object:
        answer = checkers.estimated(document)
        for checker in checkers.OF_ONE_ANSWER if answer else ():
            self.add(checker.__name__, document, checker(document, answer))
        return answer


def main(seed: int, count: int, part: str = "") -> int:
    """Ask ``count`` fresh questions and estimates, a tenth of that of each pair, or one ``part``.

    Prints how often each field was drawn and answered, and returns 1 on a violation.
    """
    questions, tally = Questions(seed), Tally()
    ask_fresh(seed, count, part, tally)
    if part != "searches":
        ask_estimates(questions, count, tally)
    if part != "estimates":
        ask_searches(questions, count, tally)
    print(f"seed {seed}: {tally.requests} requests, violations: {dict(tally.counts) or 'none'}")
    return 1 if tally.counts else 0


def ask_fresh(seed: int, count: int, part: str, tally: Tally) -> None:
    drawn, answered = Counter[str](), Counter[str]()
    for question in fresh_questions(seed, count):
        ask, document = question.ask, question.document
        if part and (ask == "estimate") != (part == "estimates"):
            continue
        found = tally.guarded(document, lambda one, ask=ask: checkers.violations_of(ask, one))
        drawn.update(question.names)
        if found is not None:
            answered.update(question.names if found[0] else ())
            tally.add(f"fresh {ask}", document, found[1])
    print("drawn / answered")
    for name, times in sorted(drawn.items()):
        print(f"  {name}: {times} / {answered[name]}")


def ask_estimates(questions: Questions, count: int, tally: Tally) -> None:
    for _ in range(count):
        tally.checked([questions.estimate()])
    for draw, law in (
        (questions.offloads, checkers.offload_is_no_faster),
        (questions.one_caller, checkers.one_memory),
        (questions.batches, checkers.whole_sequences),
        (lambda: growth.grown(questions), growth.takes_no_less_memory),
    ):
        for _ in range(count // 10):
            documents = draw()
            tally.add(law.__name__, documents, law(documents, tally.checked(documents)))
    for _ in range(count // 10):
        document = growth.shortest(questions)
        for answer in filter(None, tally.checked([document])):
            words = growth.keeps_to_reached_rate(document, answer)
            tally.add("keeps_to_reached_rate", document, words)


def ask_searches(questions: Questions, count: int, tally: Tally) -> None:
    for draw, law, share in (
        (questions.inverse, checkers.limit_is_the_limit, 50),
        (lambda: growth.pinned_limit(questions), growth.no_estimate_fits_beyond, 50),
        (questions.plan, checkers.exports_start_the_plan, 25),
    ):
        for _ in range(count // share):
            document = draw()
            words = tally.guarded(document, lambda one, law=law: list(law(one)))
            tally.add(law.__name__, document, words or ())


if __name__ == "__main__":
    seed, count, *part = sys.argv[1:]
    sys.exit(main(int(seed), int(count), *part))
