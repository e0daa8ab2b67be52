"""The requirements that a host checks before a claim, and the check results."""

from pydantic import Field, NonNegativeInt

from runners.environment_messages import MAIN
from runners.jobspec import ArtefactModel, FolderModel
from runners.wire import Figure, Message

_PRINTED = r"^[^\x00]*$"  # PostgreSQL rejects null bytes in text
MAX_SENTENCE = 600


class Needs(Message):
    """The requirements of an attempt, which its host checks before the claim."""

    kind: str
    weight_dtype: str = ""
    compute_dtype: str = ""  # of a training's matrix products
    attention: str = ""  # the attention implementation of a training
    environment: str = MAIN
    memory_bytes: NonNegativeInt = 0  # lower bound of the predicted peak, per device
    context_tokens: NonNegativeInt = 0  # of llama.cpp's KV cache, all slots; 0: not given
    model: FolderModel | ArtefactModel | None = Field(default=None, discriminator="source")
    packages: tuple[str, ...] = ()  # additional packages that its environment must pin
    num_gpus: NonNegativeInt = 0  # that its split engines share; 0: no split
    gpus: tuple[str, ...] = ()  # uuids of its GPUs; empty: all GPUs of the host
    ports: tuple[int, ...] = ()  # ports that it listens on
    compiles: bool = False  # it compiles kernels at start


class PreflightCheck(Message):
    """The result of one preflight check, with its figures."""

    name: str = Field(max_length=40, pattern=_PRINTED)
    ok: bool
    sentence: str = Field(max_length=MAX_SENTENCE, pattern=_PRINTED)
    remedy: str = Field(
        default="", max_length=MAX_SENTENCE, pattern=_PRINTED
    )  # what to do if not ok, or if it is odd
    figures: dict[str, Figure] = Field(default_factory=dict, max_length=16)


def yes(name: str, sentence: str, **figures: float) -> PreflightCheck:
    """Return a passed check."""
    return PreflightCheck(name=name, ok=True, sentence=sentence, figures=figures)


def no(name: str, sentence: str, remedy: str, **figures: float) -> PreflightCheck:
    """Return a failed check with its remedy."""
    return PreflightCheck(name=name, ok=False, sentence=sentence, remedy=remedy, figures=figures)
