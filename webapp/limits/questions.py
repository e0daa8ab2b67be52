"""The questions about limits: their texts, unknowns and applicable goals."""

from typing import NamedTuple

from planner.specs.plan import InverseQuestion

SERVING = ("serve", "generate")
TRAINING = ("finetune", "pretrain")


class Question(NamedTuple):
    """One question: tab name, title, hint, goals and unknowns.

    ``sought`` has the form fields of the unknown, which the form omits.
    """

    key: InverseQuestion
    name: str
    title: str
    hint: str
    goals: tuple[str, ...]
    sought: frozenset[str]


QUESTIONS = (
    Question(
        "longest_context",
        "Context",
        "How long a context fits?",
        "Prompt and answer together, for everyone at once",
        SERVING,
        frozenset({"input_tokens"}),
    ),
    Question(
        "most_users",
        "People",
        "How many people at once?",
        "None of them waits for memory, all within the target",
        ("serve",),
        frozenset({"concurrency"}),
    ),
    Question(
        "largest_batch",
        "Batch",
        "How large a batch fits?",
        "Sequences in one pass, without accumulation",
        ("generate", *TRAINING),
        frozenset({"batch_size", "global_batch_size"}),
    ),
    Question(
        "longest_sequence",
        "Sequence",
        "How long a training sequence fits?",
        "Tokens in one piece of text",
        TRAINING,
        frozenset({"sequence_length"}),
    ),
    Question(
        "largest_model",
        "Model",
        "Which is the largest model?",
        "Of the catalog, for each format of the weights",
        (*SERVING, "finetune"),
        frozenset({"model", "weight_dtype"}),
    ),
    Question(
        "fewest_devices",
        "Devices",
        "How few devices are enough?",
        "By doublings: layouts need sizes that divide",
        (*SERVING, *TRAINING),
        frozenset({"devices_per_node", "nodes"}),
    ),
    Question(
        "cheapest_instance",
        "Cloud offer",
        "Which is the cheapest cloud offer?",
        "Of each kind of machine the cheapest firm price",
        (*SERVING, *TRAINING),
        frozenset({"hardware", "devices_per_node", "nodes"}),
    ),
)
BY_KEY: dict[str, Question] = {question.key: question for question in QUESTIONS}


def suited(goal: str) -> tuple[Question, ...]:
    """Return the questions that apply to a goal."""
    return tuple(question for question in QUESTIONS if goal in question.goals)
