"""The command ``slipway-host prove``; it needs torch and pydantic, and no package of the site."""

import argparse
import sys
from pathlib import Path

from runners.config import DEFAULT_HOST_DIR, Credential, HostConfigError, HostDir
from runners.prove.page import TITLES
from runners.prove.report import STAGES, Record, Report, Stage
from runners.prove.run import (
    JSON_NAME,
    PAGE_NAME,
    FolderInUseError,
    ProofRun,
    as_line,
    exit_code,
    problems,
)

WORDS = "prove or disprove on this machine that every path is real, within minutes"
DEFAULT_MINUTES = 10.0
EXIT_USAGE = 2
LEAST_MINUTES, MOST_MINUTES = 0.1, 1440.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prove``; the caller adds ``--dir``."""
    parser.add_argument(
        "--stages",
        type=_stages,
        default=STAGES,
        metavar="A,B",
        help=f"only these, of {', '.join(STAGES)}",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=DEFAULT_MINUTES, help="limit of the whole run"
    )
    parser.add_argument("--device", default="", help="cpu, cuda:0 ...; default: the first GPU")
    parser.add_argument("--small", action="store_true", help="the smallest sizes: only the code")
    parser.add_argument("--json", action="store_true", help="print the report, and nothing else")
    parser.add_argument(
        "--output", type=Path, help="folder of report.json and report.html; default: DIR/prove"
    )


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if all is proven, 1 if not, 3 if not everything ran.

    A stop by Ctrl-C returns 130, by SIGTERM 143.
    """
    parser = argparse.ArgumentParser(prog="slipway-host prove", description=WORDS)
    add_arguments(parser)
    parser.add_argument("--dir", type=Path, default=DEFAULT_HOST_DIR, help="host's folder")
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Prove as the parsed options say."""
    folder = options.output or options.dir / "prove"
    credential, why_unsigned = _credential(options.dir)
    proof = ProofRun(
        folder=folder,
        stages=options.stages,
        seconds=60 * options.minutes,
        device=options.device,
        is_small=options.small,
        credential=credential,
        say=_quiet if options.json else _say,
    )
    try:
        report = proof.run()
    except FolderInUseError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    if options.json:
        sys.stdout.write(report.model_dump_json(indent=1) + "\n")
    else:
        _summarise(report, folder, why_unsigned)
    return exit_code(report, proof.stopped_by)


def _credential(folder: Path) -> tuple[Credential | None, str]:
    """Return the credential that signs the report, or None and why there is none."""
    try:
        return HostDir(folder).credential(), ""
    except HostConfigError as error:
        return None, str(error)


def _say(stage: Stage, record: Record | None) -> None:
    if record is not None:
        print(as_line(record), flush=True)
        return
    problem = f": {stage.problem}" if stage.problem else ""
    print(f"== {TITLES[stage.name]}: {stage.state}, {stage.seconds:.0f} s{problem}", flush=True)


def _quiet(_stage: Stage, _record: Record | None) -> None:
    """Print nothing."""


def _summarise(report: Report, folder: Path, why_unsigned: str) -> None:
    print(f"\n{report.device}: {report.verdict}")
    for words in problems(report):
        print(f"  {words}")
    print(f"The report: {folder / PAGE_NAME}, and as data {folder / JSON_NAME}")
    if why_unsigned:
        print(f"It is not signed: {why_unsigned}")


def _stages(text: str) -> tuple[str, ...]:
    given = tuple(each.strip() for each in text.split(",") if each.strip())
    for name in given:
        if name not in STAGES:
            raise argparse.ArgumentTypeError(f"no stage {name!r}; there are {', '.join(STAGES)}")
    return given


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {LEAST_MINUTES} and {MOST_MINUTES:.0f} minutes"
        )
    return minutes
