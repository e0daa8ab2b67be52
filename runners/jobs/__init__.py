"""Job processes: what a supervisor starts, one process per attempt.

``python -m runners.jobs.<kind> <attempt_dir>`` reads ``spec.json`` of the attempt folder,
writes artefacts below ``output/`` and checkpoints below ``checkpoint/``, and emits events
as JSON lines on the descriptor in ``SLIPWAY_EVENT_FD``. Only here are torch and
transformers imported.

The environment below is set when the package is imported, because torch's thread runtime
and the Hugging Face libraries read it once, when they themselves load.
"""

import logging
import os

OFFLINE_AND_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "KINETO_LOG_LEVEL": "6",  # its lines on each start and stop of a profile
    "TQDM_DELAY": "86400",  # delays progress bars beyond any job's duration
    # Threads that spin at barriers made evaluation 70 times slower on a busy 2-core host.
    "OMP_WAIT_POLICY": "PASSIVE",
}

# Their start-up lines concern GPU kernels that a CPU build lacks; real errors still raise.
CHATTY_LOGGERS = ("torchao", "torch.utils._pytree", "transformers", "bitsandbytes")

for _name in CHATTY_LOGGERS:
    logging.getLogger(_name).setLevel(logging.CRITICAL)
for _name, _value in OFFLINE_AND_QUIET.items():
    os.environ.setdefault(_name, _value)
