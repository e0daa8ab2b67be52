"""Runs one stage and prints its records: ``python -m runners.jobs.prove.stage STAGE FOLDER``."""

import argparse
import importlib
from pathlib import Path

from runners.jobs.prove.recorder import Recorder, records_only_on_stdout
from runners.prove.stages import STAGES


def main(arguments: list[str] | None = None) -> None:
    """Run the stage in argv."""
    parser = argparse.ArgumentParser(prog="python -m runners.jobs.prove.stage")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("folder", type=Path, help="where the stage may write")
    parser.add_argument("--device", default="", help="cpu, cuda:0 ...; default: the first GPU")
    parser.add_argument("--seconds", type=float, default=120.0, help="the stage's time limit")
    parser.add_argument("--small", action="store_true", help="the smallest sizes")
    options = parser.parse_args(arguments)
    out = records_only_on_stdout()
    import torch

    from runners.jobs.runtime import prepare_process

    prepare_process()
    name = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    recorder = Recorder(out, device, options.seconds, is_small=options.small)
    stage = importlib.import_module(f"runners.jobs.prove.{options.stage}")
    stage.run(recorder, options.folder)


if __name__ == "__main__":
    main()
