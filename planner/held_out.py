"""How far predictions are off on rows that were left out of the fit, for the factor file."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from planner.fitting import Columns, MemoryCase, fit_memory
from planner.serving_factors import fold_of, group_of, held_out, serving_cases
from planner.specs.base import JsonObject
from planner.step_fitting import StepCase, fit_step

P90 = 0.9


def summary(errors: Iterable[float] | Columns) -> JsonObject:
    """Return count, mean, median and ninetieth percentile of absolute relative errors."""
    kept = np.abs(np.asarray(list(errors), dtype=float))
    return {
        "n": len(kept),
        "mean": round(float(kept.mean()), 4),
        "median": round(float(np.median(kept)), 4),
        "p90": round(float(np.quantile(kept, P90)), 4),
    }


def rightness(verdicts: Sequence[bool]) -> JsonObject:
    """Return the count of verdicts and the share of right ones."""
    return {"n": len(verdicts), "right": round(float(np.mean(verdicts)), 4)}


def unseen_sources(cases: Sequence[StepCase]) -> dict[str, list[float]]:
    """Return the errors of each source's runs, fitted to the runs of all other sources alone."""
    found = {}
    for source in sorted({case.source for case in cases}):
        rest = [case for case in cases if case.source != source]
        prior = fit_step([case for case in rest if not case.runs_ahead])
        errors = []
        for engine in sorted({case.engine for case in cases if case.source == source}):
            factors = fit_step([case for case in rest if case.engine == engine], prior)
            errors += [c.error(factors) for c in cases if (c.source, c.engine) == (source, engine)]
        found[source] = errors
    return found


def model_of(case: MemoryCase) -> str:
    """Return what a memory row belongs to when models are left out."""
    return case.group


def source_of(case: MemoryCase) -> str:
    """Return what a memory row belongs to when sources are left out."""
    return case.source


def unseen_memory(
    cases: Sequence[MemoryCase], part_of: Callable[[MemoryCase], str] = model_of
) -> tuple[list[float], list[bool]]:
    """Return errors of peaks and rightness of verdicts, each part left out in its turn.

    A part of which its engine has no other row says nothing about unseen models: it counts
    where sources are left out, and is predicted from the prior alone.
    """
    errors, verdicts = [], []
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        for part in sorted({part_of(case) for case in own}):
            rest = [case for case in own if part_of(case) != part]
            if not rest and part_of is model_of:
                continue
            factors = fit_memory(rest)
            for case in (case for case in own if part_of(case) == part):
                peak = case.peak_bytes(factors)
                if case.measured_bytes:
                    errors.append(peak / case.measured_bytes - 1)
                else:
                    verdicts.append((peak <= case.usable_bytes) == case.ran)
    return errors, verdicts


def report(
    memory: Sequence[MemoryCase], steps: Sequence[StepCase], unseen_models: Sequence[float]
) -> JsonObject:
    """Return the held-out errors of training memory, training steps and serving."""
    peaks, verdicts = unseen_memory(memory)
    far_peaks, far_verdicts = unseen_memory(memory, source_of)
    sources = unseen_sources(steps)
    sweeps, pairs = (held_out(serving_cases(), part) for part in (fold_of, group_of))
    return {
        "training peak, unseen model": summary(peaks),
        "training peak, unseen source": summary(far_peaks),
        "training verdict, unseen model": rightness(verdicts),
        "training verdict, unseen source": rightness(far_verdicts),
        "training step, unseen model": summary(unseen_models),
        "training step, unseen source": summary(
            error for errors in sources.values() for error in errors
        ),
        "time per output token, unseen sweep": summary(sweeps[0]),
        "time to first token, unseen sweep": summary(sweeps[1]),
        "time per output token, unseen pair": summary(pairs[0]),
        "time to first token, unseen pair": summary(pairs[1]),
    }
