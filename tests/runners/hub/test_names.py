"""What people type as the name of a repository."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.specs.base import BadRequestError
from runners.hub.names import parse, parse_data
from runners.hub.repository import RepositoryName, is_safe_path
from runners.jobspec import HubModel
from runners.plans.document import ModelChoice
from runners.plans.weights import repository_of
from runners.shared.messages import CachedModel

READ = {
    "org/name": ("org/name", "", ""),
    "  Qwen/Qwen3-8B\n": ("Qwen/Qwen3-8B", "", ""),
    "org/name@v1.0": ("org/name", "v1.0", ""),
    "org/name@refs/pr/3": ("org/name", "refs/pr/3", ""),
    "hf.co/org/name": ("org/name", "", ""),
    "https://huggingface.co/org/name": ("org/name", "", ""),
    "https://huggingface.co/org/name/tree/main": ("org/name", "main", ""),
    "https://huggingface.co/org/name/discussions/3": ("org/name", "", ""),
    "https://huggingface.co/org/name/blob/main/config.json": ("org/name", "main", ""),
    "https://huggingface.co/org/name/blob/v2/sub/a.gguf": ("org/name", "v2", "sub/a.gguf"),
    "https://huggingface.co/org/name/resolve/refs%2Fpr%2F1/a.gguf?download=true": (
        "org/name", "refs/pr/1", "a.gguf",
    ),
    "hf://org/name@v1/sub/a.gguf": ("org/name", "v1", "sub/a.gguf"),
    "org/name/sub/a.GGUF": ("org/name", "", "sub/a.GGUF"),
    "hf://models/org/name": ("org/name", "", ""),
    "org/name-GGUF:Q4_K_M": ("org/name-GGUF", "", "Q4_K_M"),
    "hf.co/org/name-GGUF:UD-Q4_K_XL": ("org/name-GGUF", "", "UD-Q4_K_XL"),
    "org/name@v1:Q8_0": ("org/name", "v1", "Q8_0"),
    "_org/_name_": ("_org/_name_", "", ""),
    "org/name-GGUF:IQ2_XS@main": ("org/name-GGUF", "main", "IQ2_XS"),
    "hf.co/org/name:latest": ("org/name", "", ""),
    "org/name/a-00001-of-00002.gguf": ("org/name", "", "a-00001-of-00002.gguf"),
    "http://mirror.lan/hub/org/name/tree/main": ("org/name", "main", ""),
}  # fmt: skip
REFUSED = {
    "": "it is empty",
    "gpt2": "'gpt2' has no owner before a name",
    "org/../name": "the name '..' is not 1 to 96",
    "../name": "the owner '..' is not",
    "-org/name": "the owner '-org' is not",
    "org/name.git": "the name 'name.git' is not",
    "org/a--b": "the name 'a--b' is not",
    "org/a b": "the name 'a b' is not",
    "org/na\0me": r"the name 'na\\x00me' is not",
    f"org/{'n' * 97}": "is not 1 to 96",
    f"org/{'n' * 600}": "has 604 characters and may have 512",
    "org/name:": "what follows ':' is missing or stands twice",
    "org/name@a@b": "what follows '@' is missing or stands twice",
    "org/name@-x": "the revision '-x' is no branch",
    "org/name@a..b": "the revision 'a..b' is no branch",
    "org/name:big": "'big' is no type of GGUF files",
    "org/name/a/../b.gguf": "is no path in a repository",
    "org/name/.git/b.gguf": "is no path in a repository",
    "org/name/-b.gguf": "is no path in a repository",
    "org/name/config.json": "'config.json' is no .gguf file",
    "org/name:Q4_K_M/a.gguf": "both the type 'Q4_K_M' and the file 'a.gguf'",
    "https://huggingface.co/datasets/org/name": "the address of a data set",
    "https://ollama.com/library/org/name": "another library than the Hub",
    "ms://name": "'name' has no owner before a name",
    "https://example.org/org/name": "another site than the Hub",
    "https://ms://org/name": "another site than the Hub",
}


def test_a_repository_is_named_in_many_forms():
    for text, expected in READ.items():
        name = parse(text, "http://mirror.lan/hub")
        assert (name.repository, name.revision, name.file) == expected, text
        assert parse(str(name)) == name, text


def test_modelscope_is_named_by_its_scheme_or_the_address_of_its_page():
    pages = "https://www.modelscope.cn/models/org/name"
    for text, expected in {
        "ms://org/name": "ms://org/name",
        "ms://org/name@v1:Q8_0": "ms://org/name@v1:Q8_0",
        f"{pages}/summary": "ms://org/name",
        f"{pages}/files": "ms://org/name",
        f"{pages}/file/view/v2/sub/a.gguf?status=2": "ms://org/name@v2/sub/a.gguf",
        f"{pages}/resolve/v2/a.gguf": "ms://org/name@v2/a.gguf",
        "modelscope.cn/models/org/name": "ms://org/name",
        "MS://org/name": "ms://org/name",
    }.items():
        assert str(parse(text)) == expected, text
        assert parse(expected).hub == "modelscope", text
    assert parse("org/name").hub == ""


def test_a_page_of_modelscope_is_of_the_site_that_is_asked(monkeypatch):
    for endpoint, own, other in (
        ("", "cn", "ai"), ("http://mirror.lan", "cn", "ai"),
        ("https://www.modelscope.ai", "ai", "cn"),
    ):  # fmt: skip
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", endpoint)
        assert str(parse(f"modelscope.{own}/models/org/name")) == "ms://org/name"
        with pytest.raises(
            BadRequestError, match=f"set MODELSCOPE_ENDPOINT=https://www.m.*{other}"
        ):
            parse(f"https://modelscope.{other}/models/org/name/summary")


def test_a_refusal_names_the_field_the_value_and_the_forms():
    for text, why in REFUSED.items():
        with pytest.raises(BadRequestError, match=why) as refused:
            parse(text)
        assert refused.value.field == "repository", text
        assert str(refused.value).startswith("repository "), text
        assert "org/name@revision" in str(refused.value), text


def test_a_path_of_a_listing_stays_in_its_folder():
    bad = ("", "/a", "a//b", "a/../b", ".", "a/.git/b", "a\\b", "a\nb", "-a", "a/", "x" * 1025)
    assert [path for path in bad if is_safe_path(path)] == []
    assert is_safe_path("Q8_0/model-00001-of-00002.gguf")


def test_a_name_that_was_not_read_cannot_leave_its_folder():
    for parts in (("org/../x",), ("..", ""), ("org/name", "../../x"), ("org/name", "", "a/../b")):
        with pytest.raises(ValueError, match=" it must be "):
            RepositoryName(*parts)


PARTS = st.text("aZ0_-.\n", min_size=1, max_size=4) | st.sampled_from(
    ("a.git", "n" * 96, "n" * 97)
)
REVISIONS = st.text("a0_-+./\n", max_size=5) | st.sampled_from(("refs/pr/1", "r" * 255, "r" * 256))
FILES = st.sampled_from(("", ":Q4_K_M", f":{'n' * 300}-Q8_0", f"/{'f' * 300}.gguf", "/a/b.gguf"))


@example("_x", "_y", "", "")
@example("a", "b", "v1\n", "")
@given(PARTS, PARTS, REVISIONS, FILES)
def test_what_is_read_as_a_name_is_what_plans_jobs_and_hosts_take(owner, name, revision, file):
    repository = f"{owner}/{name}"
    text = f"{repository}@{revision}{file}" if revision else repository + file
    try:
        read = parse(text)
    except BadRequestError:
        # A line break around a name is left out where people type it.
        if file or text != text.strip():
            return
        with pytest.raises(ValidationError):
            HubModel(repository=repository, revision=revision)
        return
    model = repository_of(ModelChoice(source="hub", repository=text))
    assert model is not None
    assert (model.repository, model.revision, model.file) == (
        read.repository, read.revision, read.file,
    )  # fmt: skip
    CachedModel(repository=read.repository, commit="", size_bytes=0)


DATA_READ = {
    "tatsu-lab/alpaca": ("tatsu-lab/alpaca", "", "", ""),
    " datasets/org/name\n": ("org/name", "", "", ""),
    "hf.co/datasets/org/name": ("org/name", "", "", ""),
    "hf://datasets/org/name@v1": ("org/name", "v1", "", ""),
    "org/name:train_sft": ("org/name", "", "", "train_sft"),
    "org/name@refs/convert/parquet:test": ("org/name", "refs/convert/parquet", "", "test"),
    "https://huggingface.co/datasets/org/name": ("org/name", "", "", ""),
    "https://huggingface.co/datasets/org/name/tree/v2/?x=1": ("org/name", "v2", "", ""),
    "https://huggingface.co/datasets/org/name:test": ("org/name", "", "", "test"),
    "https://huggingface.co/datasets/org/name/tree/refs%2Fconvert%2Fparquet": (
        "org/name", "refs/convert/parquet", "", "",
    ),
    "https://huggingface.co/datasets/org/name/viewer/en/test?row=3": ("org/name", "", "en", "test"),
    "https://huggingface.co/datasets/org/name/viewer": ("org/name", "", "", ""),
    "https://huggingface.co/datasets/org/name/discussions/3": ("org/name", "", "", ""),
}  # fmt: skip
DATA_REFUSED = {
    "": "it is empty",
    "squad": "it is no owner and name",
    "data/train.jsonl/x": "'x' is no part of a name: a split follows a colon",
    "https://huggingface.co/org/name": "it is no address of a data set's page",
    "https://modelscope.cn/datasets/org/name": "it is no address of a data set's page",
    **{
        f"https://huggingface.co/datasets/org/name/{place}": f"it is the address of {inner!r}, and the "
        f"whole of a split is read: give org/name@{revision}:SPLIT, or"
        for place, revision, inner in (
            (
                "blob/main/data/test-00000-of-00001.parquet",
                "main",
                "data/test-00000-of-00001.parquet",
            ),
            ("resolve/v2/a.csv?download=true", "v2", "a.csv"),
            ("tree/main/en", "main", "en"),
            ("tree/refs%2Fconvert%2Fparquet/en/test", "refs/convert/parquet", "en/test"),
        )
    },
    "org/na--me": "the name 'na--me' is not",
    "org/name@..": "the revision '..' is no branch",
    "org/name:train[:10%]": "it is no owner and name",
    "org/name:a b": "'a b' is no split",
    f"org/{'n' * 600}": "it has 604 characters and may have 512",
}


def test_a_data_set_s_name_is_read_with_revision_subset_and_split():
    for text, expected in DATA_READ.items():
        assert tuple(parse_data(text)) == expected, text


def test_what_names_no_data_set_is_refused_with_the_forms_of_a_name():
    for text, words in DATA_REFUSED.items():
        with pytest.raises(
            BadRequestError, match=f"data_repository is .*{re.escape(words)}.*org/name:split"
        ):
            parse_data(text)
