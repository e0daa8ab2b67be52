"""The phases and steps that a job's figures are measured in, for jobs and pages.

Loading, warm-up, evaluation and saving before and after are not part of any figure.
"""

FIRST_STEPS_SKIPPED = 2  # they include allocation and kernel selection
TRAINING = "Training"  # phase of a training
MEASURING = "Measuring speed and perplexity"  # phase of a benchmark
JUDGING = "Reading held-out text"  # phase of an evaluation
ORIGINAL = "Measuring the original"  # phases of a compression
COMPRESSING = "Compressing and saving"
SAVED = "Measuring the saved model"
ORIGINAL_PREFIX = "original_"  # before the names of figures of the uncompressed model
