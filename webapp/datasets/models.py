"""Uploaded training data: the row describes a file in the data folder."""

from django.conf import settings
from django.db import models

from runners.datasets.records import left_out_words, part_words
from webapp.accounts.models import TeamOwned


class Dataset(TeamOwned):
    """One file of training data of a team, checked at upload."""

    name = models.CharField(max_length=200)  # file name; its suffix determines the parser
    sha256 = models.CharField(max_length=64)
    size_bytes = models.BigIntegerField()
    num_records = models.PositiveIntegerField()
    format = models.CharField(max_length=16)  # runners.datasets.records.Format
    samples = models.JSONField(default=list)  # the first few, each a list of [role, text]
    left_out = models.JSONField(default=dict, blank=True)  # records by a field that is not read
    num_empty = models.PositiveIntegerField(default=0)  # records without an answer to learn
    uploaded_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(fields=["team", "name", "sha256"], name="one_dataset")
        ]

    @property
    def left_out_sentence(self) -> str:
        """Return what jobs that read the file do not learn from, or nothing."""
        noun = "record" if self.num_empty == 1 else "records"
        empty = [f"{self.num_empty:,} {noun} without an answer to learn"] * bool(self.num_empty)
        parts = [*empty, *filter(None, [left_out_words(self.left_out)])]
        left_out = [f"Left out in training: {'; '.join(parts)}."] * bool(parts)
        part = [f"{words}."] if (words := part_words(self.name)) else []
        return " ".join([*left_out, *part])

    def __str__(self) -> str:
        return self.name
