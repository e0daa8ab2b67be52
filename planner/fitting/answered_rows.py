"""Published rows of a table as the planner answers them, and those that it does not answer."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from planner.fitting.evidence import Row, table
from planner.specs.base import JsonObject, PlannerError
from planner.specs.estimate import Estimate, EstimateRequest
from planner.workload.costing import estimate_request


@dataclass(frozen=True)
class AnsweredRows:
    """The rows of tables with their answers; ``refused`` counts the others by their words."""

    refused: Counter[str] = field(default_factory=Counter)

    def of(
        self, name: str, request_of: Callable[[Row], JsonObject], *, simulate: bool = False
    ) -> Iterator[tuple[Row, Estimate]]:
        """Yield each row of a table with its estimate, with percentiles if ``simulate``."""
        yield from self.among(table(name), request_of, simulate=simulate)

    def among(
        self,
        rows: Iterable[Row],
        request_of: Callable[[Row], JsonObject],
        *,
        simulate: bool = False,
    ) -> Iterator[tuple[Row, Estimate]]:
        """Yield each of these rows with its estimate."""
        for row in rows:
            try:
                request = EstimateRequest.model_validate(request_of(row))
                yield row, estimate_request(request, explain=False, simulate=simulate)
            except ValidationError as error:
                self.refuse(row, error.errors()[0]["msg"])
            except (PlannerError, ValueError) as error:
                self.refuse(row, str(error).splitlines()[0])

    def refuse(self, row: Row, words: str) -> None:
        """Count a row as not answered."""
        device = row.get("gpu_slug") or row["gpu"]
        self.refused[f"{row['model']} by {row['engine']} on {device}: {words}"] += 1

    def lines(self) -> list[str]:
        """Return the rows that were not answered as lines of a page."""
        rows = [f"- {count} of {words}" for words, count in sorted(self.refused.items())]
        return ["\nNot answered:\n", *rows] if rows else []
