"""What a host is asked to look for before it claims, and what it found."""

from pydantic import Field, FiniteFloat, NonNegativeInt

from runners.environment_messages import MAIN
from runners.jobspec import ArtefactModel, FolderModel
from runners.wire import Message

_PRINTED = r"^[^\x00]*$"  # no database keeps a null byte in text


class Needs(Message):
    """What an attempt takes of its host, which looks whether it is there before it claims."""

    kind: str
    weight_dtype: str = ""
    compute_dtype: str = ""  # in which a training's products run
    attention: str = ""  # with which a training attends
    environment: str = MAIN
    memory_bytes: NonNegativeInt = 0  # the least that its peak is predicted to be, per device
    model: FolderModel | ArtefactModel | None = Field(default=None, discriminator="source")
    packages: tuple[str, ...] = ()  # that its environment must pin, beside what it is for
    num_gpus: NonNegativeInt = 0  # that its engines divide among themselves; 0: it divides none
    gpus: tuple[str, ...] = ()  # uuids of the GPUs that it was given; none: every one there is
    ports: tuple[int, ...] = ()  # ports that it will listen on
    compiles: bool = False  # it builds kernels when it starts


class PreflightCheck(Message):
    """One question that a host asked of itself, with the figures that answered it."""

    name: str = Field(max_length=40, pattern=_PRINTED)
    ok: bool
    sentence: str = Field(max_length=600, pattern=_PRINTED)
    remedy: str = Field(default="", max_length=600, pattern=_PRINTED)  # what to do if not ok
    figures: dict[str, FiniteFloat] = Field(default_factory=dict, max_length=16)


def yes(name: str, sentence: str, **figures: float) -> PreflightCheck:
    """Return a question that the host passed."""
    return PreflightCheck(name=name, ok=True, sentence=sentence, figures=figures)


def no(name: str, sentence: str, remedy: str, **figures: float) -> PreflightCheck:
    """Return a question that the host failed, with what to do."""
    return PreflightCheck(name=name, ok=False, sentence=sentence, remedy=remedy, figures=figures)
