"""What a job needs of its model: weights, a place on every host, a decoder or an encoder."""

from planner.specs.model import ModelSpec
from runners.jobspec import ArtefactModel, DemoModel, ModelRef, RandomModel
from runners.plans.refusals import DraftProblem
from runners.plans.spread import Spread


def needs_weights(model: ModelRef, verb: str) -> None:
    """Refuse a model without trained weights on the host.

    Raises:
        DraftProblem: the model has no weights on the host; the message names a remedy.
    """
    if isinstance(model, RandomModel | DemoModel):
        raise DraftProblem(
            f"{verb} needs trained weights, and this model has none on the host. Train the demo "
            "model first and choose the result, or name a model of the catalog, a repository of "
            "the Hub or a folder on the host.",
            "source",
        )


def check_model(model: ModelRef, spread: Spread) -> None:
    """Refuse a model stored on one host for a job on several.

    Raises:
        DraftProblem: the model is an artefact of a job on one host.
    """
    if spread.num_hosts > 1 and isinstance(model, ArtefactModel):
        raise DraftProblem(
            "This model's weights are on one host, and the job runs on several. Copy the model's "
            "folder to the models folder of each host, and choose the model source “A folder on a "
            "host”.",
            "source",
        )


def check_encoder(shape: ModelSpec | None, *, is_classifier: bool) -> None:
    """Refuse classification with a text model, and text training with an encoder.

    Raises:
        DraftProblem: model and method do not match; the message names a remedy.
    """
    is_encoder = shape is not None and shape.is_encoder
    if is_classifier and not is_encoder:
        raise DraftProblem(
            "Classification needs an encoder (DistilBERT); this model is a decoder. "
            "Choose an encoder, or another method.",
            "method",
        )
    if is_encoder and not is_classifier:
        raise DraftProblem(
            "This model is an encoder, which predicts no text. Fine-tune it with the method "
            "“Classification”.",
            "method",
        )
