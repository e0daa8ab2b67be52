"""llama.cpp's own parser of its server's arguments, which xllamacpp's library has inside.

xllamacpp offers fields only. Its library exports ``common_params_parse`` of llama.cpp's
``common/arg.h``, and a ``CommonParams`` of xllamacpp is the C++ struct after Python's object head
(measured for xllamacpp 2026.10.11549). A trial on the port proves both before a job relies on it.
"""

import ctypes
import importlib
import os
from collections.abc import Sequence
from typing import Any

PARSER = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
SERVER = 12  # LLAMA_EXAMPLE_SERVER of common/common.h
VARIABLES = "LLAMA_ARG_"  # the parser takes these from the environment as well
TRIAL_PORT = 54_321


class ArgumentsError(Exception):
    """The parser refused the arguments, or is another one than known."""


def read_arguments(params: Any, words: Sequence[str]) -> None:  # noqa: ANN401 - xllamacpp's own
    """Set the fields of a ``CommonParams`` as llama.cpp's server reads these arguments.

    Raises:
        ArgumentsError: an argument is refused; llama.cpp has printed why.
    """
    module = importlib.import_module("xllamacpp")
    library = importlib.import_module("xllamacpp.xllamacpp")
    try:
        parse = getattr(ctypes.CDLL(library.__file__), PARSER)
    except (AttributeError, OSError) as error:
        raise ArgumentsError(f"this build of xllamacpp has no parser: {error}") from error
    parse.restype = ctypes.c_bool
    for name in [each for each in os.environ if each.startswith(VARIABLES)]:
        del os.environ[name]
    trial = module.CommonParams()
    if not _parse(parse, trial, ["--port", str(TRIAL_PORT)]) or trial.port != TRIAL_PORT:
        raise ArgumentsError("this build of xllamacpp has another parser than the known one")
    if not _parse(parse, params, words):
        raise ArgumentsError("llama.cpp refused the arguments")


def _parse(parse: Any, params: Any, words: Sequence[str]) -> bool:  # noqa: ANN401 - of ctypes
    texts = [b"llama-server", *(each.encode() for each in words)]
    argv = (ctypes.c_char_p * (len(texts) + 1))(*texts, None)
    address = ctypes.c_void_p(id(params) + object.__basicsize__)
    return bool(parse(len(texts), argv, address, SERVER, None))
