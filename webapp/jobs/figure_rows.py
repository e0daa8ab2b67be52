"""The figure cards of a job's page: a few shown, the rest folded, and a summary."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from webapp.jobs.measured_figures import JobFigure, JobFigures

MOST_CARDS = 8
NAMED = 3  # folded figures named in the label


class Cards(NamedTuple):
    """The figures of a job, the main ones apart."""

    shown: Sequence[JobFigure]
    folded: Sequence[JobFigure]
    answer: str

    @property
    def rows(self) -> list[JobFigure]:
        """Return all figures, for the table."""
        return [*self.shown, *self.folded]

    @property
    def folded_words(self) -> str:
        """Return the label of the folded figures: a count and some names."""
        names = [each.definition.label for each in self.folded[:NAMED]]
        more = ", …" if len(self.folded) > NAMED else ""
        return f"{len(self.folded)} more: {', '.join(names)}{more}"


def cards_of(figures: JobFigures) -> Cards:
    """Return the cards of a job: predicted figures first, then the others, in their order.

    Figures of an original model are shown in the before/after table instead.
    """
    rows = [each for name, each in figures.items() if not name.startswith("original_")]
    rows = [each for each in rows if "/" not in each.name and each.name != "run_seconds"]
    first = sorted(rows, key=lambda each: each.predicted is None)
    return Cards(first[:MOST_CARDS], first[MOST_CARDS:], answer(rows))


def answer(rows: Iterable[JobFigure]) -> str:
    """Return in one sentence how many measured figures lie in their intervals, no warm-ups."""
    comparable = [row for row in rows if row.place]
    if not comparable:
        return ""
    inside = sum(row.place == "inside" for row in comparable)
    so_far = " so far" if any(row.state == "so_far" for row in comparable) else ""
    if inside == len(comparable):
        return f"Every measured figure lies inside its 80 % interval{so_far}."
    return (
        f"{inside} of {len(comparable)} measured figures lie inside their 80 % interval{so_far}."
    )
