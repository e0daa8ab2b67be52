"""Job processes: what a supervisor starts, one process per attempt.

``python -m runners.jobs.<kind> <attempt_dir>`` reads ``spec.json`` of the attempt folder,
writes artefacts below ``output/`` and checkpoints below ``checkpoint/``, and emits events
as JSON lines on the descriptor in ``SLIPWAY_EVENT_FD``. Only here are torch and
transformers imported.
"""
