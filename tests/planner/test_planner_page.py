"""The docs page of the command line names what there is, and its examples work."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from planner.catalog.instances import list_instances
from planner.exports.registry import FORMATS
from planner.specs.cluster import ClusterSpec
from planner.specs.inverse import InverseQuestion
from planner.workload.resolve import resolve_cluster

PAGE = (Path(__file__).parents[2] / "templates" / "docs" / "planner.md").read_text("utf-8")
EXAMPLES = [json.loads(line) for line in re.findall(r"^\{.*\}$", PAGE, re.MULTILINE)]


def test_the_page_counts_the_offers_as_they_are():
    offers = list_instances()
    providers = {offer.provider for offer in offers}

    assert f"{len(offers)} offers of {len(providers)} providers" in PAGE


@pytest.mark.parametrize("name", [*FORMATS, *get_args(InverseQuestion)])
def test_the_page_names_every_format_and_every_question(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_pages_clusters_are_ones_that_the_planner_takes(example):
    (value,) = example.values()
    for one in value if isinstance(value, list) else [value]:
        cluster = resolve_cluster(ClusterSpec.model_validate(one))

        assert cluster.device.price_usd_per_hour > 0


def test_the_page_has_examples():
    assert len(EXAMPLES) == 3
