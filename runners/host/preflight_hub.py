"""Preflight's check of what the job would download by name: files, room on the disk, access.

The hub is asked by a process of its own (``runners.hub.query``). The team's token is not on the
host yet: a repository that the site has looked up passes though it is closed to others.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.specs.units import GIB
from runners.environments.builder import Store
from runners.host.preflight_weights import printed, size_text
from runners.hub.links import measured_rates
from runners.hub.object_store import STORE_ENVIRONMENT
from runners.hub.pruning import read_rule
from runners.hub.repository import COMMIT
from runners.hub.settings import cache_folder, existing_folder
from runners.hub.store import cached_repositories
from runners.jobspec import HubData, HubModel
from runners.launchers import launch
from runners.launchers.model_uses import uses_on_host
from runners.shared.config import HostDir
from runners.shared.log_text import last_line
from runners.shared.messages import PreflightCheck, no, yes

QUERY = "runners.hub.query"
HUB_SECONDS = 8.0  # for the hub's answer; the agent sends no heartbeat meanwhile
START_SECONDS = 12.0  # to import the hub's library on a busy machine
NEEDS_TOKEN = frozenset({"absent", "gated", "unauthorised"})  # the team's token may lift them
NAMED = "Correct the name of the repository or its revision in the plan."
REMEDIES: Mapping[str, Mapping[str, str]] = {
    "model": {
        "absent": NAMED,
        "pickle_only": "Choose a repository with safetensors files.",
        "remote_code": "Choose a model that the engines know without code of its own.",
    },
    "data": {
        "absent": NAMED,
        "no_split": "Correct the split or the subset in the plan.",
        "ambiguous": "Name one of its subsets in the plan.",
        "remote_code": "Name the revision refs/convert/parquet, or a data set without a script.",
        "unusable": "Choose another data set, or give a file on the host.",
    },
}
OUT_OF_REACH = (
    "Connect the host to the hub, or set HF_ENDPOINT for its agent to a mirror that it reaches; "
    "or copy the files to a folder of the host and plan with that."
)
OUT_OF_REACH_MODEL = (
    "Connect the host to the hub, or set HF_ENDPOINT for its agent to a mirror that it reaches; "
    "or copy the model here over the site: from another host on this host's page, or from your "
    "machine by `slipway models push FOLDER HOST`."
)


def check(
    model: HubModel | HubData,
    host_dir: Path,
    least_free_bytes: int,
    trusted_code: Sequence[str] = (),
) -> PreflightCheck:
    """Return whether a host can have a repository's files: there already, or to be downloaded.

    ``least_free_bytes``: of the disk that stay free beside the download. ``trusted_code``: the
    repositories, as org/name@commit, whose own code may run.
    """
    answer = _ask(model, host_dir, trusted_code)
    name, problem = model.repository, printed(str(answer.get("problem", "")))
    title = "data" if isinstance(model, HubData) else "model"
    if answer.get("state") == "hub":
        records = model.records if isinstance(model, HubData) else None
        return _room(title, name, answer, host_dir, least_free_bytes, records)
    if answer.get("state") == "cache":
        code = f" {words}" if (words := answer.get("code")) else ""
        sentence = f"{name} is in this host's cache; the hub does not answer: {problem}{code}"
        return yes(title, printed(sentence))
    kind = str(answer.get("kind", ""))
    if kind in NEEDS_TOKEN and COMMIT.fullmatch(model.revision):  # which the site has looked up
        return yes(title, printed(f"The job downloads {name} with the team's token: {problem}"))
    return no(
        title,
        printed(f"{name} cannot be downloaded: {problem}"),
        REMEDIES[title].get(kind, OUT_OF_REACH_MODEL if title == "model" else OUT_OF_REACH),
    )


def check_store(url: str, host_dir: HostDir) -> PreflightCheck:
    """Return what the job does first for a model in an object store, which may be read here.

    The store is not asked: the team's key is not on the host yet.
    """
    sentence = f"{url} is listed and downloaded first, with the team's key if it has one"
    store = Store(host_dir)
    if not store.is_ready(store.pins(STORE_ENVIRONMENT)):
        sentence += f"; before that the job builds the environment {STORE_ENVIRONMENT}"
    return yes("model", printed(f"{sentence}. Whether there is room is seen then."))


def _room(
    title: str,
    name: str,
    answer: Mapping[str, Any],
    host_dir: Path,
    least_free_bytes: int,
    records: int | None,
) -> PreflightCheck:
    total, missing = int(answer["total_bytes"]), int(answer["missing_bytes"])
    more = int(answer["most_bytes"]) - total if records else 0
    named = f"{name} at {str(answer['commit'])[:12]}, {size_text(total)},"
    code = f" {words}" if (words := answer.get("code")) else ""
    if more > 0:
        code += (
            f" That is the first file: of the split's other {size_text(more)} as many follow as "
            f"{records:,} records need."
        )
    if not missing:
        sentence = printed(f"{named} is in this host's cache.{code}")
        return yes(title, sentence, total_bytes=float(total))
    cache = existing_folder(Path(str(answer["cache"])))
    free, needed = shutil.disk_usage(cache).free, missing + least_free_bytes
    figures = {"missing_bytes": float(missing), "free_bytes": float(free)}
    sentence = (
        f"{named} is downloaded first: {size_text(missing)} to {cache}, where "
        f"{free / GIB:.1f} GiB are free."
    )
    if rate := measured_rates(host_dir).get(str(answer["link"])):
        sentence += f" It takes {rate.words(missing)}."
        figures["seconds"] = missing / rate.median
    prunable = int(answer.get("prunable_bytes", 0))
    if free < needed <= free + prunable:
        sentence += (
            " For that, this host's rule deletes the models that were not used for longest."
        )
    if free + prunable >= needed:
        return yes(title, printed(f"{sentence}{code}"), **figures)
    remedy = (
        f"Free {size_text(needed - free)} there: {least_free_bytes / GIB:.1f} GiB of the disk "
        "stay free. Or set HF_HOME for the host's agent to a larger disk."
    )
    return no(title, printed(sentence), remedy, **figures)


def _ask(model: HubModel | HubData, host_dir: Path, trusted_code: Sequence[str]) -> dict[str, Any]:
    """Return the answer of a query process; a failure of the process is an answer too."""
    env, rule = launch.render_env(host_dir, 1) | launch.hub_env(), read_rule(host_dir)
    question = model.model_dump(exclude={"source"}) | {"seconds": HUB_SECONDS}
    question |= {"trusted": list(trusted_code)}
    if isinstance(model, HubData):
        question |= {"host_dir": str(host_dir)}
    if rule.keep_bytes is not None:
        is_used = uses_on_host(host_dir / "attempts")
        spared = [each for each in cached_repositories(cache_folder(env)) if is_used(each)]
        question |= {"rule": rule.document(), "spared": spared}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", QUERY],
            input=json.dumps(question) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=HUB_SECONDS + START_SECONDS,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        seconds = HUB_SECONDS + START_SECONDS
        return {"problem": f"the hub did not answer within {seconds:g} s."}
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        words = last_line(ended.stderr, f"code {ended.returncode}, no message")
        return {"problem": f"asking the hub failed: {words}"}
    return answer if isinstance(answer, dict) else {}
