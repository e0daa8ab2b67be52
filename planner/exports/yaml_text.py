"""Write plain data as YAML with PyYAML, formatted like the tools' own examples."""

import yaml

# YAML 1.1 line breaks that PyYAML writes unescaped but folds when reading.
ODD_BREAKS = frozenset("\x85\u2028\u2029")


class _Writer(yaml.SafeDumper):
    """A YAML dumper that indents list items and does not use aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - PyYAML calls it so
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _represent_text(writer: _Writer, text: str) -> yaml.ScalarNode:
    """Return a multi-line text as a block scalar if possible."""
    style = "|" if "\n" in text else None
    if not ODD_BREAKS.isdisjoint(text):
        style = '"'
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Writer.add_representer(str, _represent_text)


def yaml_text(value: object) -> str:
    """Return plain data as YAML that reads back as the same data under YAML 1.1.

    >>> print(yaml_text({"a": [1, {"b": "yes"}], "c": {}, "d": 1e-5}))
    a:
      - 1
      - b: 'yes'
    c: {}
    d: 1.0e-05
    <BLANKLINE>
    """
    return yaml.dump(
        value, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=float("inf")
    )
