"""Download what a job names by repository or in an object store, then start its program.

``python -m runners.jobs.fetch ATTEMPT_DIR COMMAND...``. The download is a phase of the job with
progress. Then ``spec.json`` has each one's folder, or files, in place of its name, and this
process execs the command, so that the supervisor keeps its pid. The command does not get the hub's
token or the store's key, and the proxies only where it still builds an environment.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from runners.datasets.conversations import DataError
from runners.datasets.records import Reader
from runners.environments.builder import BuildError, PinsError, Store
from runners.hub.data_files import CARD, data_files, look_up_data
from runners.hub.download import download
from runners.hub.errors import DownloadStoppedError, HubError
from runners.hub.links import of_host
from runners.hub.listing import HubFile, Listing, look_up, read_config, with_code_stated
from runners.hub.object_store import S3, STORE_ENVIRONMENT
from runners.hub.objects import StoreAddress, StoreReader, settings_of
from runners.hub.pruning import prune, read_rule
from runners.hub.repository import GGUF, MODULE, RepositoryName, store_repository
from runners.hub.selection import INDEX, SINGLE, adapter_files, code_files, exact_files, some
from runners.hub.settings import (
    HUB_TOKEN,
    TOKENS,
    HubSettings,
    HubSettingsError,
    existing_folder,
    from_environment,
    usual_hub,
)
from runners.hub.splits import note_of, stored_split
from runners.hub.store import mark_used, missing, resolve_offline, snapshot_folder, stored_listing
from runners.jobs import OFFLINE_AND_QUIET
from runners.jobs.events import Emitter
from runners.jobs.in_environment import (
    STARTING,
    TERMINATED,
    drop_pip_variables,
    prepare_environment,
)
from runners.jobs.model_files import (
    CODE_FOLDERS_VARIABLE,
    MODEL_ROOTS_VARIABLE,
    gguf_names,
)
from runners.jobs.runtime import EXIT_BAD_INPUT, BadInputError, read_request
from runners.jobspec import DownloadedData, FileData, FolderModel, HubData, HubModel, ServeSpec
from runners.jobspec.base import DataOptions, renames_of, resume_from_of
from runners.jobspec.engines import ENGINES, OWN
from runners.jobspec.references import (
    Reference,
    hub_references,
    store_references,
    with_references,
)
from runners.launchers.attempts import DIRECTORY_VARIABLE, KNOWN_VARIABLES, attempt_folders
from runners.launchers.launch import HUB_VARIABLES, IN_ENVIRONMENT, OFFLINE, is_passed
from runners.launchers.model_uses import LINKS, uses_on_host
from runners.shared.config import HostConfigError, HostDir
from runners.shared.environment import NETWORK, tracker_variables
from runners.shared.messages import RunRequest
from runners.shared.object_stores import store_of
from runners.supervision import child
from runners.supervision.classification import DOWNLOAD_FAILED, ENVIRONMENT_NOT_BUILT

LOOK_UP_SECONDS = 30.0
COMMITS = "listings.json"  # in the attempt's folder: of each address of a store
REPORT_SECONDS = 1.0  # between two reports of progress
# What a job ends with, by the kind of failure; others are of the network or the hub.
MARKERS = {
    "disk_full": "DISK_FULL",
    **dict.fromkeys(
        (
            "absent", "ambiguous", "gated", "no_split", "pickle_only", "refused", "remote_code",
            "unauthorised", "unusable",
        ),
        "MODEL_OR_DATA_MISSING",
    ),
}  # fmt: skip


class Fetching:
    """The downloads of one job, with one progress figure for each model."""

    def __init__(
        self,
        attempt_dir: Path,
        settings: HubSettings,
        emitter: Emitter,
        trusted: Collection[str] = (),
    ) -> None:
        self._attempt_dir, self._settings, self._emitter = attempt_dir, settings, emitter
        self._host_dir = attempt_dir.parent.parent
        self._others: dict[str, HubSettings] = {}  # of a hub beside the first one
        self._adapters: frozenset[Reference] = frozenset()
        self._own: frozenset[str] = frozenset()  # in the cache, all that the job names
        self._trusted = frozenset(trusted)
        self.code_folders: list[Path] = []  # whose own code the job runs
        self._jobs: tuple[str, ...] = ()  # this one, and the one that it resumes
        self._stopped = threading.Event()
        self._reported_at = 0.0

    def stop(self) -> None:
        """End the download soon; what arrived stays for the next job."""
        self._stopped.set()

    def end(self) -> None:
        """Report that the job itself begins."""
        self._emitter.phase(STARTING, begins_anew=True)

    def goes_on_from(self, request: RunRequest) -> None:
        """Keep to the commits of addresses that the same job had, or the one that it resumes."""
        self._jobs = tuple(filter(None, (request.job_id, resume_from_of(request.spec))))

    def _keep_to_commit(self, url: str, commit: str) -> None:
        """Note an address's commit; refuse one that is not that of an earlier attempt.

        Raises:
            HubError: refused.
        """
        for folder in attempt_folders(self._attempt_dir.parent):
            noted = child.read_json(folder.path / COMMITS) or {}
            before = noted.get(url, commit)
            if before == commit or not (request := folder.request()):
                continue
            if request.job_id in self._jobs:
                raise HubError(
                    "refused",
                    f"{url} is not what attempt {folder.attempt_id} of job {request.job_id} read "
                    f"(commit {before[:12]}, now {commit[:12]}): put its objects back, or launch "
                    "a new job that resumes none",
                )
        noted = child.read_json(self._attempt_dir / COMMITS) or {}
        child.write_json(self._attempt_dir / COMMITS, {**noted, url: commit})

    def all_of(
        self, spec: BaseModel, weights: Collection[str]
    ) -> dict[Reference, FolderModel | DownloadedData]:
        """Return the folder of each model's files, and the files of each data set.

        What a spec names is kept by the host's rule from before the first download.

        Raises:
            HubError: a repository, an address or its files cannot be had.
            BuildError, PinsError: the library that asks a store cannot be had.
        """
        repositories, addresses = hub_references(spec), store_references(spec)
        self._own = frozenset({
            *(each.repository for each in repositories),
            *(store_repository(each.path) for each in addresses),
        })  # fmt: skip
        self._adapters = frozenset(each.adapter for each in getattr(spec, "adapters", ()))
        found: dict[Reference, FolderModel | DownloadedData] = {}
        for each in repositories:
            found[each] = self.place_of(each)
        for named in addresses:
            found[named] = self.from_store(named, weights)
        return found

    def place_of(self, model: HubModel | HubData) -> FolderModel | DownloadedData:
        """Return the folder of a repository's files; download those that are not there.

        Raises:
            HubError: the repository or its files cannot be had.
        """
        settings = self._settings_of(model)
        try:
            listing, files = self._files_of(model, settings)
        except HubError as error:
            return self._stored(model, error, settings)
        name = f"{model.repository}@{listing.commit[:12]}"
        if isinstance(model, HubData) and model.records:
            files = self._first_records(name, listing, files, settings, model)
        folder = self._downloaded(name, listing, files, settings)
        self._runs([file for file in files if file.path.endswith(MODULE)], folder)
        names = [file.path for file in files]
        if isinstance(model, HubData):
            self._emitter.log(f"{name}: the split {model.split} is {some(names)}")
            note = note_of(self._host_dir, model, listing.commit)
            note.parent.mkdir(mode=0o700, exist_ok=True)
            child.write_json(note, {"paths": names})
        return self._chosen(model, folder, names)

    def _first_records(
        self,
        name: str,
        listing: Listing,
        files: Sequence[HubFile],
        settings: HubSettings,
        data: HubData,
    ) -> tuple[HubFile, ...]:
        """Download a split's files until they hold the records that a job reads; return them."""
        own = [each for each in files if each.path == CARD]
        parts = [each for each in files if each.path != CARD]
        wanted = data.records or 0
        for number, part in enumerate(parts, 1):
            folder = self._downloaded(name, listing, [*own, *parts[:number]], settings)
            wanted -= num_records(folder / part.path, data, wanted)
            if wanted <= 0:
                words = f"{number} of {len(parts)} files hold the first {data.records:,} records"
                self._emitter.log(f"{name}: {words}")
                return (*own, *parts[:number])
        return (*own, *parts)

    def _downloaded(
        self, name: str, listing: Listing, files: Sequence[HubFile], settings: HubSettings
    ) -> Path:
        """Return the folder of a listing's files; download those that are not there."""
        self._emitter.phase(f"Downloading {name}"[:80])
        self._emitter.log(
            f"{name}: {len(files)} files, {sum(file.size for file in files):,} bytes"
        )
        self._make_room(listing, sum(file.size for file in missing(listing, files, settings)))
        folder = download(
            listing,
            files,
            settings,
            on_progress=self._report,
            should_stop=self._stopped.is_set,
        )
        self._emitter.log(f"{name} is complete in {folder}")
        mark_used(folder)
        return folder

    def from_store(
        self, named: FolderModel | FileData, weights: Collection[str]
    ) -> FolderModel | DownloadedData:
        """Return the folder of a model, or the file of data, of an object store's address.

        ``weights``: the kinds that the job reads, ``safetensors`` or ``gguf``.

        Raises:
            HubError: the address or its files cannot be had.
            BuildError, PinsError: the library that asks the store cannot be had.
        """
        store = store_of(named.path, HostDir(self._host_dir).config().object_stores)
        if store is None:  # it was, when the job was started
            raise HubError("absent", f"{named.path} is below none of this host's object stores")
        address = StoreAddress(named.path, store)
        settings = settings_of(address, self._settings)
        repository = store_repository(named.path)
        try:
            python = prepare_environment(Store(HostDir(self._host_dir)), STORE_ENVIRONMENT)
            reader = StoreReader(python, store_variables(settings), self._stopped.is_set)
            listing = reader.look_up(address, settings)
        except HubError as error:
            commit = resolve_offline(repository, "", settings)
            found = commit and stored_listing(repository, commit, settings)
            if not error.is_out_of_reach or not found:
                raise
            listing = dataclasses.replace(found, address=named.path)
            files = self._of_store(named, listing, settings, weights)
            folder = snapshot_folder(settings, repository, listing.commit)
            self._uses_cached(named.path, folder, error)
            self._keep_to_commit(named.path, listing.commit)
        else:
            self._keep_to_commit(named.path, listing.commit)
            files = self._of_store(named, listing, settings, weights)
            files = reader.with_digests(files, address, settings)
            folder = self._downloaded(named.path, listing, files, settings)
        names = [file.path for file in files]
        if isinstance(named, FileData):
            path = folder / names[0]
            return DownloadedData(name=path.name, paths=(str(path),), **read_as(named))
        if any(name.lower().endswith(GGUF) for name in names):
            return self._links(repository, folder, names)
        return FolderModel(path=str(folder))

    def _of_store(
        self,
        named: FolderModel | FileData,
        listing: Listing,
        settings: HubSettings,
        weights: Collection[str],
    ) -> tuple[HubFile, ...]:
        """Return the files that a job reads of an address.

        Raises:
            HubError: there are none, or several models.
        """
        if isinstance(named, FileData):
            if len(listing.files) != 1:
                raise HubError(
                    "ambiguous",
                    f"{named.path} has {len(listing.files)} files "
                    f"({some([each.path for each in listing.files])}): name one of them",
                )
            return listing.files
        if named in self._adapters:
            return adapter_files(listing)
        has_safetensors = bool({INDEX, SINGLE} & listing.paths)
        has_gguf = any(path.lower().endswith(GGUF) for path in listing.paths)
        is_gguf = has_gguf and ("safetensors" not in weights or not has_safetensors)
        if is_gguf:
            return exact_files(listing, "gguf", "", settings)
        listing = with_code_stated(listing, settings, LOOK_UP_SECONDS)
        code: tuple[HubFile, ...] = ()
        if listing.needs_remote_code:
            code = self._code_of(listing, HubModel(repository=listing.repository), settings)
        return (*exact_files(listing, "safetensors", "", settings, is_built_in=True), *code)

    def _runs(self, code: Sequence[HubFile], folder: Path) -> None:
        """Let the job run the code of a folder, if there is any, and say so."""
        if code:
            modules = some([file.path for file in code])
            self._emitter.log(f"{folder}: its own code runs, as allowed: {modules}")
            self.code_folders.append(folder)

    def _settings_of(self, model: HubModel | HubData) -> HubSettings:
        """Return the settings of the hub that has a model; data sets are Hugging Face's."""
        hub = model.hub or usual_hub(own_variables()) if isinstance(model, HubModel) else ""
        if hub in {"", self._settings.hub}:
            return self._settings
        if hub not in self._others:
            found = with_token(from_environment(own_variables(), hub=hub))
            self._others[hub] = of_host(found, self._host_dir)
        return self._others[hub]

    def _files_of(
        self, model: HubModel | HubData, settings: HubSettings
    ) -> tuple[Listing, tuple[HubFile, ...]]:
        """Return a repository as the hub has it, and the files of it that the job needs."""
        name = RepositoryName(model.repository, model.revision)
        if isinstance(model, HubData):
            listing = look_up_data(name, settings, LOOK_UP_SECONDS)
            return listing, data_files(listing, model.subset, model.split, settings)
        listing = look_up(name, settings, LOOK_UP_SECONDS)
        listing = with_code_stated(listing, settings, LOOK_UP_SECONDS)
        code = self._code_of(listing, model, settings)
        # Whether the model runs at all is decided by now.
        files = exact_files(listing, model.weights, model.file, settings, is_built_in=True)
        return listing, (*files, *code)

    def _code_of(
        self, listing: Listing, model: HubModel, settings: HubSettings
    ) -> tuple[HubFile, ...]:
        """Return the modules that a model runs, of a repository of the hub or of the cache.

        None where transformers has the architecture, whose own code is then not run.

        Raises:
            HubError: it needs code of its own, and ``code_files`` has none that may run.
        """
        if not listing.needs_remote_code or model.weights != "safetensors":
            return ()
        from transformers import CONFIG_MAPPING

        if read_config(listing, settings).get("model_type") in CONFIG_MAPPING:
            return ()
        return code_files(listing, settings, self._trusted)

    def _make_room(self, listing: Listing, missing_bytes: int) -> None:
        """Delete models by the host's rule, if it has one, where a download would break it."""
        rule = read_rule(self._host_dir)
        if not missing_bytes or rule.keep_bytes is None:
            return
        cache = existing_folder(self._settings.cache)
        lacking = missing_bytes + self._settings.margin_bytes - shutil.disk_usage(cache).free
        others = uses_on_host(self._attempt_dir.parent, but=self._attempt_dir)
        own = self._own | {listing.repository}
        for model in prune(
            self._settings,
            rule,
            lambda repository: repository in own or others(repository),
            incoming_bytes=missing_bytes,
            lacking_bytes=lacking,
            host_dir=self._host_dir,
        ):
            name = f"{model.repository}@{model.commit[:12]}"
            self._emitter.log(f"{name}, {model.bytes:,} bytes, was deleted by this host's rule")

    def _stored(
        self, model: HubModel | HubData, error: HubError, settings: HubSettings
    ) -> FolderModel | DownloadedData:
        """Return a repository's files as they are in the cache, where the hub is out of reach."""
        commit = resolve_offline(model.repository, model.revision, settings)
        if not error.is_out_of_reach or commit is None:
            raise error
        folder = snapshot_folder(self._settings, model.repository, commit)
        listing = stored_listing(model.repository, commit, settings)
        code: tuple[HubFile, ...] = ()
        if isinstance(model, HubModel) and listing is not None:
            code = self._code_of(listing, model, settings)
        self._uses_cached(model.repository, folder, error)
        self._runs(code, folder)
        if isinstance(model, HubData):
            if names := stored_split(self._host_dir, model, commit, self._settings):
                return self._chosen(model, folder, names)
            raise error  # files that are there may be a part of the split
        there = {path.name for path in folder.iterdir()}
        return self._chosen(
            model, folder, gguf_names(there, str(folder)) if model.weights == "gguf" else []
        )

    def _uses_cached(self, name: str, folder: Path, error: HubError) -> None:
        """Say that the job reads what is there, as the source is out of reach."""
        self._emitter.phase(f"Out of reach: cached {name}"[:80])
        self._emitter.log(f"{error}; the job uses {folder}, which is there")
        mark_used(folder)

    def _chosen(
        self, model: HubModel | HubData, folder: Path, names: Sequence[str]
    ) -> FolderModel | DownloadedData:
        """Return the folder of a model; of GGUF files one that has the chosen ones alone."""
        if isinstance(model, HubData):
            paths = tuple(str(folder / name) for name in names if name != CARD)
            shown = f"{model.name}/{model.split}{Path(paths[0]).suffix}"
            return DownloadedData(name=shown, paths=paths, **read_as(model))
        if model.weights != "gguf":
            return FolderModel(path=str(folder))
        return self._links(model.repository, folder, names)

    def _links(self, repository: str, folder: Path, names: Sequence[str]) -> FolderModel:
        """Return a folder that has some files of a snapshot alone."""
        links = self._attempt_dir / LINKS / repository.rpartition("/")[2]
        links.mkdir(parents=True, exist_ok=True)
        for name in names:
            link = links / Path(name).name
            link.unlink(missing_ok=True)
            link.symlink_to((folder / name).resolve())
        return FolderModel(path=str(links))

    def _report(self, done: int, total: int, bytes_per_second: float) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_SECONDS and done < total:
            return
        self._reported_at = now
        left = (total - done) / bytes_per_second if bytes_per_second else None
        self._emitter.progress(done, total, "bytes", left)


def read_as(data: DataOptions) -> dict[str, Any]:
    """Return how the records of data are read, whatever its source."""
    return {name: getattr(data, name) for name in DataOptions.model_fields}


def num_records(path: Path, data: DataOptions, most: int) -> int:
    """Return how many records a file has, ``most`` at most; fewer if one of them is invalid."""
    count = 0
    with path.open("rb") as file, contextlib.suppress(DataError):  # which the job's reader says
        reader = Reader(path.name, data.format, renames_of(data.columns))
        for _ in islice(reader.records(file), most):
            count += 1
    return count


def fetch_models(attempt_dir: Path, fetching: Fetching) -> None:
    """Download what ``spec.json`` names elsewhere, and write the folders into it.

    Raises:
        HubError: a model cannot be had.
        BuildError, PinsError: the library that asks an object store cannot be had.
        BadInputError: ``spec.json`` cannot be read.
    """
    path = attempt_dir / "spec.json"
    request = read_request(path)
    fetching.goes_on_from(request)
    engine = request.spec.engine if isinstance(request.spec, ServeSpec) else OWN
    places = fetching.all_of(request.spec, ENGINES[engine].weights)
    kinds = (HubModel, HubData, FolderModel, FileData)
    spec = with_references(
        request.spec,
        lambda each: places.get(each, each) if isinstance(each, kinds) else each,
    )
    fetching.end()
    child.write_json(path, request.model_copy(update={"spec": spec}).model_dump(mode="json"))


def drop_credentials(command: Sequence[str]) -> None:
    """Remove the hub's variables, and the files of its tokens, before the command.

    A command that may build an environment keeps those of the network, for pip: it removes them.
    """
    kept = {*tracker_variables(), *(NETWORK if IN_ENVIRONMENT in command else ())}
    files = (f"{name}_FILE" for name in TOKENS)
    for variable in (*HUB_VARIABLES, *TOKENS, KNOWN_VARIABLES[HUB_TOKEN], *files):
        if not is_passed(variable) and variable not in kept:  # passed: such as the cache's folder
            os.environ.pop(variable, None)
    os.environ |= OFFLINE
    if secrets := os.environ.get(DIRECTORY_VARIABLE):
        for name in TOKENS:
            (Path(secrets) / name).unlink(missing_ok=True)


def store_variables(settings: HubSettings) -> dict[str, str]:
    """Return the environment of the process that asks a store: the network and the team's key.

    Without the team's, the host's own credentials are found by its library.
    """
    names = ("HOME", "PATH", "PYTHONPATH", "PYTHONSAFEPATH", *NETWORK)
    env = {name: os.environ[name] for name in names if name in os.environ}
    if settings.authorities:
        env["AWS_CA_BUNDLE"] = str(settings.authorities)
    for name in S3.secrets:
        if path := os.environ.get(f"{name}_FILE"):
            with contextlib.suppress(OSError):
                env[name] = Path(path).read_text().strip()
    if not any(name in env for name in S3.secrets):
        env |= {name: os.environ[name] for name in S3.secrets if name in os.environ}
    return env


def own_variables() -> dict[str, str]:
    """Return this process's variables without those that this package set for the job itself."""
    return {name: value for name, value in os.environ.items() if name not in OFFLINE_AND_QUIET} | {
        name: os.environ[name] for name in HUB_VARIABLES if name in os.environ
    }


def with_token(settings: HubSettings) -> HubSettings:
    """Return settings with the team's token, else with the one that the host's user has."""
    name = KNOWN_VARIABLES.get(settings.token_name, f"{settings.token_name}_FILE")
    path, own = os.environ.get(name), settings.source.token_file
    if not path and (settings.token or not own):
        return settings
    place = Path(path) if path else settings.cache.parent / own
    with contextlib.suppress(OSError):
        return dataclasses.replace(settings, token=place.read_text().strip())
    return settings


def main() -> None:
    """Download and exec the job; if that fails, exit with 3 and the cause on stderr."""
    folder, *command = sys.argv[1:]
    emitter = Emitter.from_environment()
    try:
        host_dir = Path(folder).parent.parent
        settings = of_host(with_token(from_environment(own_variables())), host_dir)
        trusted = read_request(Path(folder) / "spec.json").trusted_code
        fetching = Fetching(Path(folder), settings, emitter, trusted)
        signal.signal(signal.SIGTERM, lambda *_: fetching.stop())
        fetch_models(Path(folder), fetching)
    except DownloadStoppedError:
        sys.exit(TERMINATED)
    except (BuildError, PinsError) as error:
        sys.stderr.write(f"{ENVIRONMENT_NOT_BUILT}: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    except (HubError, HubSettingsError, HostConfigError, BadInputError) as error:
        marker = getattr(error, "prefix", "") or MARKERS.get(getattr(error, "kind", ""))
        sys.stderr.write(f"{marker or DOWNLOAD_FAILED}: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    finally:
        emitter.close()
    drop_credentials(command)
    if IN_ENVIRONMENT not in command:
        drop_pip_variables()
    roots = os.environ.get(MODEL_ROOTS_VARIABLE, "")
    cache = str(settings.cache)
    os.environ[MODEL_ROOTS_VARIABLE] = os.pathsep.join(filter(None, (roots, cache)))
    if fetching.code_folders:
        os.environ[CODE_FOLDERS_VARIABLE] = os.pathsep.join(map(str, fetching.code_folders))
        # Of this job on this host alone: hosts of a job may share the folder of its attempt.
        os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules-", dir=folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execv(command[0], command)  # noqa: S606 - no shell: a list


if __name__ == "__main__":
    main()
