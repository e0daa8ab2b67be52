"""Captions of charts: the figures of the chart as text."""

from webapp.charts.catalog import ChartSpec
from webapp.charts.figures import SIDE_WORDS, Series, value_text
from webapp.core.display import quantity
from webapp.core.units import deviation_words
from webapp.jobs.measured_figures import JobFigure, JobFigures


def caption(chart: ChartSpec, series: Series, figures: JobFigures | None) -> str:
    """Return a chart's caption, for accessibility and quick reading."""
    chart_figures = [figures[name] for name in chart.figures if figures and name in figures]
    sentences = [figure_words(each) for each in chart_figures if each.measured is not None]
    if sentences:
        return " ".join(sentences)
    drawn = of_points(chart, series)
    predicted = next((each for each in chart_figures if each.predicted), None)
    return f"{drawn} {figure_words(predicted)}" if predicted else drawn


def of_points(chart: ChartSpec, series: Series) -> str:
    """Return a caption from the drawn points, if no figure has a value."""
    values = series.known
    if not values:
        return "No points yet."
    span = f"between {value_text(min(values), chart)} and {value_text(max(values), chart)}"
    return f"{value_text(values[-1], chart)} at the last point, {span}."


def figure_words(figure: JobFigure) -> str:
    """Return one figure as a sentence: name, value, deviation from the prediction."""
    label, prediction = figure.definition.label, figure.predicted
    predicted = f"predicted {quantity(prediction.value, figure.unit)}" if prediction else ""
    if figure.shown is None:
        words = f"{label}: {figure.state_words}"
        return f"{words}; {predicted}." if prediction else f"{words}."
    start = f"{label} {figure.shown}"
    if figure.state == "warm_up":
        tail = f"; {predicted}" if prediction else ""
        return f"{start} so far; {figure.state_words}{tail}."
    so_far = " so far" if figure.state == "so_far" else ""
    if prediction is None or figure.ratio is None:
        return f"{start}{so_far}."
    deviation = deviation_words(figure.ratio)
    return f"{start}{so_far}, {deviation} the {predicted}{SIDE_WORDS[figure.place]}."
