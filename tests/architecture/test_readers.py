"""Files that people bring are read by one reader for each format; every other is listed here.

A call that reads a format is found in the code itself. It stands in ``READERS``, which all that
take people's files share, or in ``OTHERS`` with the reason why no person's file gets there.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARSERS = ("json", "yaml", "tomllib", "pickle", "marshal", "torch", "np")
LIBRARIES = (
    "safe_open", "load_file", "from_pretrained", "apply_chat_template", "GGUFReader",
    "ParquetFile", "load_dataset", "safe_load",
)  # fmt: skip
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")

READERS: dict[str, tuple[str, set[str]]] = {
    "runners/cli/plans.py": (
        "requests and configs in JSON or YAML, by the one who runs the command; the planner checks",
        {"json.loads", "safe_load", "read_text"},
    ),
    "runners/datasets/text.py": ("text, lines and JSON", {"json.loads"}),
    "runners/datasets/parquet.py": ("tables, in a process of its own", {"ParquetFile"}),
    "runners/hub/cards.py": (
        "a data set's card: longer than what imports read, of which its configs become values",
        {"yaml.parse"},
    ),
    "runners/hub/folders.py": ("the notes of hf download beside its files", {"read_text"}),
    "runners/hub/store.py": ("the cache's refs, which name a commit", {"read_text"}),
    "runners/jobs/evaluation_tasks.py": ("task files, with text.py's reader", {"yaml.load"}),
    "runners/jobs/chat_template.py": ("a model's chat template", {"apply_chat_template"}),
    "runners/jobs/model_files.py": (
        "model folders: which files are the model; vocabularies and the cache's refs/main",
        {"json.loads", "read_text", "glob weights"},
    ),
    "runners/jobs/weights.py": (
        "tensors of the files that weight_files names; their headers are checked before",
        {"json.loads", "safe_open", "load_file", "from_pretrained", "glob weights"},
    ),
    "runners/jobs/folder_query.py": (
        "the same files under limits; json is the question of the process that asks",
        {"json.loads", "safe_open"},
    ),
    "runners/jobs/loading.py": ("tokenizers of opened folders", {"from_pretrained"}),
    "runners/jobs/adapters.py": ("matrices of an opened adapter", {"safe_open"}),
    "runners/jobs/generate/placement.py": ("an opened folder", {"from_pretrained"}),
    "runners/jobs/generate/stage_model.py": ("an opened folder", {"from_pretrained"}),
    "runners/jobs/train/classifying.py": ("an opened folder", {"from_pretrained"}),
    "runners/jobs/train/trl/job.py": (
        "tokenizers of opened folders, and records that we wrote anew",
        {"from_pretrained", "load_dataset"},
    ),
    "runners/jobs/train/trl/teacher.py": ("opened folders", {"from_pretrained"}),
}

OWN = "written by Slipway itself"
MESSAGE = "a message between processes, with limits of its own"
SYSTEM = "of the operating system or a driver"
SHIPPED = "part of the product"
OTHERS: dict[str, tuple[str, set[str]]] = {
    "runners/cli/plan_request.py": ("a copy of a document", {"json.loads"}),
    "runners/cli/config.py": ("the user's own configuration", {"read_text", "tomllib.loads"}),
    "runners/cli/hardware.py": (f"{SYSTEM}; rates that it kept", {"read_text", "json.loads"}),
    "runners/cli/mcp.py": (OWN, {"read_text"}),
    "runners/cli/output.py": (OWN, {"json.loads"}),
    "runners/cli/quantities.py": ("an argument of the command", {"json.loads"}),
    "runners/datasets/conversations.py": (OWN, {"json.loads"}),
    "runners/datasets/parquet_process.py": (MESSAGE, {"json.loads"}),
    "runners/devices/other.py": (SYSTEM, {"read_text"}),
    "runners/devices/topology.py": (SYSTEM, {"json.loads", "read_text"}),
    "runners/environments/builder.py": (SHIPPED, {"read_text"}),
    "runners/environments/read_engine_args.py": (
        "what the parser of an installed engine printed",
        {"json.loads"},
    ),
    "runners/host/bench.py": (OWN, {"json.loads", "read_text"}),
    "runners/host/hub_cache.py": (MESSAGE, {"json.loads"}),
    "runners/host/hub_cache_program.py": (MESSAGE, {"json.loads"}),
    "runners/host/inventory.py": (SYSTEM, {"read_text"}),
    "runners/host/preflight_hub.py": (MESSAGE, {"json.loads"}),
    "runners/host/preflight_weights.py": (MESSAGE, {"json.loads"}),
    "runners/hub/objects.py": (MESSAGE, {"json.loads"}),
    "runners/hub/pruning.py": (OWN, {"json.loads"}),
    "runners/hub/query.py": (MESSAGE, {"json.loads"}),
    "runners/hub/s3_program.py": (MESSAGE, {"json.loads"}),
    "runners/hub/splits.py": (OWN, {"json.loads"}),
    "runners/jobs/bench/device_rates.py": (SYSTEM, {"read_text"}),
    "runners/jobs/compress/compressed_store.py": (OWN, {"json.loads", "safe_open"}),
    "runners/jobs/compress/gguf.py": (
        "the file that the job has just written, and the tokenizer as its library prints it",
        {"GGUFReader", "json.loads"},
    ),
    "runners/jobs/compress/shearing.py": (OWN, {"json.loads", "load_file", "read_text"}),
    "runners/jobs/corpus.py": (OWN, {"from_pretrained", "np.load"}),
    "runners/jobs/energy.py": (SYSTEM, {"read_text"}),
    "runners/jobs/events.py": (OWN, {"json.loads", "read_text"}),
    "runners/jobs/fetch.py": ("the token of the hub, where its library keeps it, and a store's key", {"read_text"}),
    "runners/jobs/generate/answering.py": (OWN, {"json.loads", "read_text"}),
    "runners/jobs/generate/chained.py": (MESSAGE, {"json.loads"}),
    "runners/jobs/generate/offload_cases.py": (MESSAGE, {"json.loads", "read_text"}),
    "runners/jobs/load/job.py": (MESSAGE, {"json.loads"}),
    "runners/jobs/memory.py": (SYSTEM, {"read_text"}),
    "runners/jobs/prove/*": (OWN, {"json.loads", "read_text", "glob weights"}),
    "runners/jobs/runtime.py": (OWN, {"read_text"}),
    "runners/jobs/serve/*": (MESSAGE, {"json.loads", "read_text"}),
    "runners/jobs/tracker_program.py": (MESSAGE, {"json.loads"}),
    "runners/jobs/tracking.py": (MESSAGE, {"json.loads", "read_text"}),
    "runners/jobs/train/text_samples.py": (OWN, {"json.loads", "read_text"}),
    "runners/jobs/train/trl/policy.py": (
        "prompts as TRL itself writes them, to count their tokens",
        {"apply_chat_template"},
    ),
    "runners/jobs/train/trl/reward_worker.py": (MESSAGE, {"json.loads", "read_text"}),
    "runners/jobs/train/trl/rewards.py": (MESSAGE, {"json.loads"}),
    "runners/jobs/train/checkpoint.py": (OWN, {"json.loads", "read_text"}),
    "runners/jobs/train/checkpoint_files.py": (OWN, {"safe_open"}),
    "runners/jobs/train/communication.py": (MESSAGE, {"json.loads"}),
    "runners/jobs/train/evaluator.py": (OWN, {"json.loads", "load_file", "read_text"}),
    "runners/jobs/train/local_ranks.py": (OWN, {"json.loads", "read_text"}),
    "runners/jobs/train/tokenised_samples.py": (OWN, {"json.loads", "read_text"}),
    "runners/jobs/train/trl/data.py": (OWN, {"json.loads"}),
    "runners/jobspec/base.py": (MESSAGE, {"json.loads"}),
    "runners/jobspec/call_parsers.py": (SHIPPED, {"tomllib.loads", "read_text"}),
    "runners/jobspec/engine_args.py": (
        f"{SHIPPED}; json is a word of a launch, as its engine reads it",
        {"json.loads", "read_text", "tomllib.loads"},
    ),
    "webapp/replay/traces.py": (
        "shapes are part of the product; a trace is a file that the operator names",
        {"read_text", "tomllib.loads"},
    ),
    "runners/launchers/agent_end.py": (OWN, {"json.loads", "read_text"}),
    "runners/launchers/kubernetes_api.py": ("the API server's replies", {"json.loads"}),
    "runners/launchers/model_uses.py": (OWN, {"json.loads", "read_text"}),
    "runners/launchers/node_command.py": ("what its own job printed", {"read_text"}),
    "runners/launchers/ray_api.py": (
        "Ray's replies, and the token that the operator named",
        {"json.loads", "read_text"},
    ),
    "runners/launchers/ray_driver.py": (OWN, {"json.loads", "read_text"}),
    "runners/launchers/slurm_commands.py": ("what Slurm's programs print", {"json.loads"}),
    "runners/prove/*": (SHIPPED, {"read_text"}),
    "runners/shared/load_generator.py": (MESSAGE, {"json.loads"}),
    "runners/shared/*": (OWN, {"json.loads", "read_text"}),
    "runners/supervision/*": (f"{SYSTEM}, or {MESSAGE}", {"json.loads", "read_text"}),
    "webapp/accounts/*": (OWN, {"json.loads"}),
    "webapp/api/parsing.py": ("the body of a request, strictly", {"json.loads"}),
    "webapp/api/*": (SYSTEM, {"read_text"}),
    "webapp/bench/*": (OWN, {"json.load", "json.loads", "read_text"}),
    "webapp/boot/*": (
        f"{OWN}, {SHIPPED}, or {SYSTEM}", {"json.loads", "read_text", "tomllib.loads", "open text"},
    ),
    "webapp/core/*": (OWN, {"read_text"}),
    "webapp/gateway/journal.py": (OWN, {"json.loads"}),
    "webapp/gateway/refusals.py": (MESSAGE, {"json.loads"}),
    "webapp/hosts/*": ("the authority of the site's own Redis", {"read_text"}),
    "webapp/jobs/*": (f"{OWN}, or {SHIPPED}", {"json.loads", "read_text"}),
    "webapp/metrics/*": (OWN, {"json.loads"}),
    "webapp/operations/*": (OWN, {"json.loads", "read_text"}),
    "webapp/pages/docs.py": (SHIPPED, {"read_text"}),
    "webapp/pages/playground.py": (MESSAGE, {"json.loads"}),
    "webapp/servers/reading.py": ("what an observed server answers", {"json.loads"}),
}  # fmt: skip


# What a module must hold to be worth parsing.
READS = re.compile(
    rf"\b(?:{'|'.join(PARSERS)})\.(?:load|parse)|\b(?:{'|'.join(LIBRARIES)})\b|read_text|encoding=|"
    rf"glob\([^)]*(?:{'|'.join(map(re.escape, WEIGHTS))})"
)
MODELS = re.compile(r"\bBaseModel\b")


def modules(holding: re.Pattern[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the product's modules on hosts and on the site, by their paths."""
    for path in sorted([*ROOT.glob("runners/**/*.py"), *ROOT.glob("webapp/**/*.py")]):
        if holding.search(text := path.read_text("utf-8")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def reads(module: ast.Module) -> Iterator[str]:
    """Yield the kinds of calls in a module that read a format or text."""
    for call in ast.walk(module):
        if not isinstance(call, ast.Call):
            continue
        function = call.func
        owner = getattr(getattr(function, "value", None), "id", "")
        name = getattr(function, "attr", getattr(function, "id", ""))
        pattern = str(getattr(call.args[0], "value", "")) if call.args else ""
        if owner in PARSERS and name in {"load", "loads", "parse"}:
            yield f"{owner}.{name}"
        elif name in LIBRARIES or (name == "read_text" and isinstance(function, ast.Attribute)):
            yield name
        elif name == "open" and any(each.arg == "encoding" for each in call.keywords):
            yield "open text"
        elif name in {"glob", "rglob"} and pattern.endswith(WEIGHTS):
            yield "glob weights"


def test_the_walk_finds_a_reader_in_every_spelling():
    for source, kind in (
        ("json.loads(text)", "json.loads"),
        ("yaml.safe_load(text)", "safe_load"),
        ("yaml.parse(text)", "yaml.parse"),
        ("AutoModel.from_pretrained(folder)", "from_pretrained"),
        ("folder.glob('**/*.safetensors')", "glob weights"),
        ("path.open('r', encoding='latin-1')", "open text"),
        ("open(path, encoding='utf-8')", "open text"),
        ("Path(name).read_text('utf-8')", "read_text"),
        ("torch.load(path)", "torch.load"),
    ):
        assert READS.search(source), source
        assert list(reads(ast.parse(source))) == [kind], source


def test_what_people_bring_is_read_by_the_one_reader_of_its_format():
    """A call that is not listed, and a listed one that is gone, both fail."""
    listed = READERS | OTHERS
    found: dict[str, set[str]] = defaultdict(set)
    for name, module in modules(READS):
        place = (
            name
            if name in listed
            else next((each for each in listed if fnmatch(name, each)), name)
        )
        for kind in reads(module):
            _, kinds = listed.get(place, ("", set()))
            assert kind in kinds, f"{name} reads by {kind}: use the reader of the format"
            found[place].add(kind)
    stale = {
        place: kinds - found[place] for place, (_, kinds) in listed.items() if kinds - found[place]
    }
    assert not stale, "listed readers that are gone"


# Models that take fields without a word about unknown ones, and why nobody's field gets lost.
OPEN = {
    "BatchRun": "a line that another program prints",
    "Sampling": "a part of models that forbid them",
    "CompressOptions": "a part of models that forbid them",
    "Reply": "what a newer server sends to an older client",
    "EndpointCard": "a part of what an endpoint says of itself",
    "Window": "what the control process stored, of this release or another",
    "_RayReply": "what Ray replies, of any release",
    "ProofSummary": "what a host's page shows of the facts of a report",
}


def test_every_model_of_what_is_sent_refuses_a_field_that_it_does_not_know():
    """Those of answers, ninja's ``Schema``, are not asked: the site fills them itself."""
    found = set()
    for name, module in modules(MODELS):
        for each in ast.walk(module):
            if isinstance(each, ast.ClassDef) and any(
                getattr(base, "id", "") == "BaseModel" for base in each.bases
            ):
                found.add(each.name)
                is_strict = "extra='forbid'" in ast.unparse(each)
                assert is_strict or each.name in OPEN, (name, each.name)
    assert len(found) > len(OPEN)
