"""Variables of the environment: read in few places, checked at the start, told in the docs."""

import ast
import re
from collections.abc import Iterator

import pytest

from webapp.boot import up
from webapp.boot.console import Problem
from webapp.boot.suite import ROOT
from webapp.core.site_settings import READERS

# The modules that may read a variable by its name besides the two readers, and which ones; any
# other module hands the whole environment to a reader, or on to a process that it starts.
READER = {"webapp/settings.py", "webapp/core/site_settings.py", "runners/shared/environment.py",
          "runners/shared/addresses.py"}  # fmt: skip
EXCEPTIONS = {
    # Which Python and which programs start the site, before there is a setting.
    "webapp/asgi.py": {"DJANGO_SETTINGS_MODULE"},
    "webapp/gateway/asgi.py": {"DJANGO_SETTINGS_MODULE"},
    "webapp/boot/cli.py": {"DJANGO_SETTINGS_MODULE"},
    "webapp/boot/environment.py": {
        "PYTHONDONTWRITEBYTECODE", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "SLIPWAY_CHROMIUM",
    },
    "webapp/boot/suite.py": {"HYPOTHESIS_PROFILE", "PATH"},
    "webapp/operations/management/commands/doctor.py": {"PATH"},
    # Whether a key is in the environment, which a backup then lacks.
    "webapp/operations/backup.py": {"variable"},
    "webapp/core/vault.py": {"VARIABLE"},
    # The user of the command line, who is neither the site's nor a host's operator.
    "runners/cli/main.py": {"PYDANTIC_DISABLE_PLUGINS", "DEBUG"},
    "runners/cli/output.py": {"COLUMNS"},
    # The host's operator.
    "runners/shared/config.py": {"SLIPWAY_REDIS_CA"},
    "runners/shared/timing.py": {"VARIABLE"},
    "runners/jobs/energy.py": {"ROOT_VARIABLE"},
    "runners/jobs/runtime.py": {  # and what torchrun and the agent set
        "OMP_NUM_THREADS", "KERNEL_CACHE", "COUNT_VARIABLE", "GANG_VARIABLE", "HOST_DIR_VARIABLE", "RAYON_NUM_THREADS",
    },
    "runners/jobs/prove/recorder.py": {"KERNEL_CACHE"},
    "runners/launchers/launch.py": {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "name"},
    "runners/supervision/child.py": {"CXX"},
    "runners/host/schedulers.py": {"name", "SLURM_CONF"},
    # What a process of ours sets for the one that it starts, and torchrun for a rank.
    "runners/host/app.py": {"HOST_DIR_VARIABLE", "AGENT_VARIABLE"},
    "runners/host/tasks.py": {"HOST_DIR_VARIABLE"},
    "runners/host/tunnel.py": {"HOST_DIR_VARIABLE", "AGENT_VARIABLE"},
    "runners/jobs/__init__.py": {"_name"},
    "runners/jobs/events.py": {"EVENT_FD_VARIABLE", "TORCHELASTIC_RUN_ID", "LOCAL_RANK"},
    "runners/jobs/fetch.py": {
        "CODE_FOLDERS_VARIABLE", "DIRECTORY_VARIABLE", "HF_MODULES_CACHE", "MODEL_ROOTS_VARIABLE",
        "f'{name}_FILE'", "name", "variable",
    },
    "runners/jobs/in_environment.py": {"HOST_DIR_VARIABLE", "variable"},
    "runners/jobs/model_files.py": {"CODE_FOLDERS_VARIABLE", "MODEL_ROOTS_VARIABLE"},
    "runners/jobs/tracking.py": {"DIRECTORY_VARIABLE", "RANK", "name"},
    "runners/jobs/tracker_program.py": {
        "MLFLOW_ALLOW_FILE_STORE", "TRACKIO_DIR", "WANDB_API_KEY", "options.pop('secrets')",
    },
    "runners/jobs/train/trl/rewards.py": {"name"},
    "runners/jobs/train/trl/policy.py": {"REWARD_ROOTS_VARIABLE"},
    "runners/jobs/ranks.py": {"TORCHELASTIC_RUN_ID", "LOCAL_RANK", "RANK", "WORLD_SIZE"},
    "runners/jobs/serve/sglang/server.py": {"KEY"},
    "runners/jobs/serve/llamacpp/arguments.py": {"name"},  # which it takes away
    # Lists of names that a child of another kind is given.
    "runners/datasets/parquet_process.py": {"name"},
    "runners/environments/builder.py": {"name"},
    "runners/jobs/publish.py": {"HF_TOKEN"},
    "runners/launchers/kubernetes_api.py": {"KUBECONFIG", "KUBERNETES_SERVICE_HOST"},
    "runners/launchers/kubernetes_nodes.py": {"ADDRESS", "INDEX"},
    "runners/launchers/ray_nodes.py": {"ADDRESS", "INDEX", "RUN", "WORDS", "child.EVENT_FD"},
    "runners/launchers/slurm_commands.py": {"name"},
    "runners/launchers/slurm_end.py": {"SLURM_JOB_ID", "SLURM_RESTART_COUNT"},
    "runners/launchers/slurm_nodes.py": {"SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_NODEID"},
    "runners/supervision/supervisor.py": {"name"},
    "runners/host/overhead_bench.py": {"PATH"},
}  # fmt: skip
# Our own variables that no operator sets.
INTERNAL = {
    "SLIPWAY_CODE_FOLDERS", "SLIPWAY_HOST_DIR", "SLIPWAY_EVENT_FD", "SLIPWAY_MODEL_ROOTS", "SLIPWAY_AGENT_PID",
    "SLIPWAY_ATTEMPT", "SLIPWAY_ENGINE_KEY", "SLIPWAY_ENGINE_PROCESS", "SLIPWAY_GANG",
    "SLIPWAY_SECRETS_DIR", "SLIPWAY_TRACKER_VARIABLES", "SLIPWAY_REWARD_ROOTS",
    "SLIPWAY_POD_IP", "SLIPWAY_NODE_IP", "SLIPWAY_NODE_INDEX", "SLIPWAY_RAY_RUN", "SLIPWAY_RAY_WORDS",
}  # fmt: skip
OF_HOSTS = {"SLIPWAY_REDIS_CA", "SLIPWAY_POWERCAP_DIR"}
OF_USERS = {"SLIPWAY_SERVER", "SLIPWAY_TOKEN", "SLIPWAY_BENCH_KEY"}
OF_TESTS = {"SLIPWAY_CHROMIUM"}
OWN = re.compile(r"SLIPWAY_[A-Z_]+[A-Z]")


def modules(*words: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules whose text holds one of the words."""
    for package in ("webapp", "runners"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text("utf-8")
            if any(word in text for word in words):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def is_environ(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def words_of(node: ast.expr) -> str:
    """The name of a variable, or of the constant that holds it."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def reads(tree: ast.Module) -> set[str]:
    """What a module reads from the process's environment by name."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=value, slice=name) if is_environ(value):
                found.add(words_of(name))
            case ast.Call(func=ast.Attribute(value=value), args=[name, *_]) if is_environ(value):
                found.add(words_of(name))
            case ast.Call(func=ast.Attribute(attr="getenv") | ast.Name(id="getenv"), args=[n, *_]):
                found.add(words_of(n))
            case ast.Compare(left=name, comparators=[value]) if is_environ(value):
                found.add(words_of(name))
    return found


def test_a_variable_is_read_by_name_in_a_reader_or_where_the_table_says():
    found = {name: names for name, tree in modules("environ", "getenv") if (names := reads(tree))}
    strange = {
        name: names - EXCEPTIONS.get(name, set())
        for name, names in found.items()
        if name not in READER and not names <= EXCEPTIONS.get(name, set())
    }
    assert strange == {}
    unused = {name: names - found.get(name, set()) for name, names in EXCEPTIONS.items()}
    assert {name: names for name, names in unused.items() if names} == {}


def test_every_variable_of_ours_is_checked_at_the_start_and_in_the_docs():
    named: set[str] = set()
    for _, tree in modules("SLIPWAY_"):
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named |= {text for text in texts if isinstance(text, str) and OWN.fullmatch(text)}
    assert named - INTERNAL - OF_HOSTS - OF_USERS - OF_TESTS <= set(READERS)
    own_pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    pages = [*(ROOT / "templates" / "docs").glob("*.md"), *own_pages]
    told = "".join(page.read_text("utf-8") for page in pages)
    others = {"HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "TMPDIR"}
    wanted = {*READERS, *OF_HOSTS, *OF_USERS, *OF_TESTS, *others}
    assert {name for name in wanted if f"`{name}" not in told} == set()


def test_a_value_that_cannot_work_stops_the_start_with_its_name_and_shows_no_password(tmp_path):
    empty = tmp_path / "empty.pem"
    empty.touch()
    ntlm, unsorted = tmp_path / "ntlm.txt", tmp_path / "unsorted.txt"
    ntlm.write_text(f"{'0' * 32}:4\n")
    unsorted.write_text("".join(f"{digit * 40}:1\n" for digit in "0213"))
    wrong = {
        "SLIPWAY_DATA_DIR": ["~nobody-of-this-name/slipway"],
        "SLIPWAY_PUBLIC_URL": ["http://slipway.example.org", "https://[fd00::1"],
        "SLIPWAY_ALLOWED_HOSTS": ["my_box", "fd00:::1"],
        "FORWARDED_ALLOW_IPS": ["proxy.lan", "10.0.0.7/8"],
        "SLIPWAY_ADMIN_PATH": ["staff only"],
        "SLIPWAY_ADMIN_NETWORKS": ["office", "10.0.0.1/8"],
        "SLIPWAY_GATEWAYS": [
            "gateway.lan", "/tunnel/", "https://gateway.lan", "ws://", "ws://u:cret@gateway.lan/",
            "wss://gateway.lan:port", "wss://gateway.lan/?key=cret",
        ],
        "SLIPWAY_SECRETS_KEYS": ["no-key"],
        "DATABASE_URL": [
            "mysql://u:cret@db/s", "postgresql://u:12#cret@db/s", "postgresql://u:1?cret@db/s",
            "sqlite://:memory:", "db.example.org", "postgresql://u:cret@db:port/s",
        ],
        "REDIS_URL": [
            "redis.lan:6379", "http://redis", "redis://:pa#cret@redis", "redis://:1/cret@redis",
            "redis://:pa?cret@redis", "redis://redis:port", "redis://redis/name", "unix://",
            "rediss://redis?ssl_cert_reqs=none",
        ],
        "SLIPWAY_HOST_REDIS_URL": ["unix:///run/redis.sock", "redis.lan:6380"],
        "SLIPWAY_REDIS_CA": ["/no/such/ca.pem", str(empty)],
        "SLIPWAY_EMAIL_URL": ["smtp://user:cret/@mail:x", "mail.lan"],
        "SLIPWAY_EMAIL_FROM": [],  # judged with the server's address
        "SLIPWAY_SYSLOG": [
            "logs.lan:514", "http://logs", "tcp://", "tcp://logs:port", "unix://logs/socket",
            "unix:///", "udp://u:cret@logs", "tls://logs/path", "tls://logs?ca=none",
        ],
        "SLIPWAY_BREACHED_PASSWORDS": [
            "/no/such/list", str(empty), str(tmp_path), str(ntlm), str(unsorted),
            "http://api.pwnedpasswords.com", "https://u:cret@api.lan", "https://",
        ],
        "HF_ENDPOINT": ["mirror.lan", "https://u:cret@mirror.lan", "ftp://mirror.lan"],
        "HF_TOKEN": ["hf_secret_ü"],
        "SLIPWAY_DRILLS": ["maybe"],
        "SLIPWAY_DEBUG": ["2"],
        "SLIPWAY_DEMO_SECONDS": ["soon", "0", "-5", "nan", "1e9"],
        "SLIPWAY_TIME_SCALE": ["fast", "2"],
        "SLIPWAY_SECRET_KEY": [],  # every text is one; none means the file
        "TZ": [],  # unknown ones show UTC, with a line
    }  # fmt: skip
    assert wrong.keys() == READERS.keys()
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(Problem, match=f"^{name} (is|has|cannot|begins)") as problem:
                up.check_variables({name: value})
            assert "cret" not in str(problem.value).replace("secret", ""), value
        up.check_variables({name: " "})


def test_values_are_taken_as_people_write_them():
    key = "pvGdxTfBmOqtE5uTzUw8q6ztyBuhMmS4JF2cGqe9ZQk="
    for name, value in [
        ("REDIS_URL", " redis://[fd00::1]:6379/0\n"),
        ("REDIS_URL", "redis://user:p%2Fw%40%23@redis.lan"),
        ("REDIS_URL", "unix://slipway:secret@/run/my%20redis.sock"),
        ("DATABASE_URL", " postgresql://user:p%2Fw@[fd00::1]:5432/slipway "),
        ("DATABASE_URL", "postgresql:///slipway?host=/run/postgresql"),
        ("DATABASE_URL", "sqlite:////srv/my data/slipway.sqlite3"),
        ("SLIPWAY_ADMIN_NETWORKS", "10.0.0.0/8 [fd00::]/8"),
        ("SLIPWAY_GATEWAYS", " wss://gateway.lan:8443/t/ , ws://[fd00::1]\n"),
        ("SLIPWAY_SYSLOG", " tls://logs.lan "),
        ("SLIPWAY_SYSLOG", "udp://[fd00::1]:5514"),
        ("SLIPWAY_SYSLOG", "unix:///run/my%20collector.sock"),
        ("SLIPWAY_SECRETS_KEYS", f"{key} , {key}\n"),
        ("SLIPWAY_DEMO_SECONDS", " 40 "),
    ]:
        up.check_variables({name: value})


def test_code_that_reads_a_variable_in_any_form_is_seen():
    code = (
        "import os\nfrom os import getenv\nos.environ['A']; os.environ.get('B', ''); 'C' in os.environ\n"
        "os.getenv('D'); getenv('E'); os.environ.setdefault('F', '1'); os.environ[NAME]; f(os.environ)\n"
    )
    assert reads(ast.parse(code)) == {*"ABCDEF", "NAME"}
