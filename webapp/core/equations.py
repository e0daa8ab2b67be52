"""Equations of the planner as MathML: fractions, indices and powers as they are set in print."""

import re
from collections.abc import Iterator

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

TOKEN = re.compile(
    r"\s*(\d+(?:\.\d+)?|[A-Za-z\u0391-\u03c9_][A-Za-z0-9\u0391-\u03c9_]*|[²³]|[·/+\-=(),^<>|])"
)
SIGNS = {"·": "·", "-": "\u2212"}
POWERS = {"²": "2", "³": "3"}
WORDS = ("where", "for", "with")  # a condition in words follows

CONDITION = re.compile(rf",? (?:{'|'.join(WORDS)}) ")


class _UnreadableError(Exception):
    """The text is no equation of this grammar."""


class _Reader:
    """Reads sums of products of fractions of names, numbers, calls and bracketed sums."""

    def __init__(self, text: str) -> None:
        self.symbols = list(self._symbols(text))
        self.at = 0

    @staticmethod
    def _symbols(text: str) -> Iterator[str]:
        at = 0
        while at < len(text.rstrip()):
            found = TOKEN.match(text, at)
            if found is None:
                raise _UnreadableError(text)
            yield found[1]
            at = found.end()

    @property
    def next(self) -> str:
        return self.symbols[self.at] if self.at < len(self.symbols) else ""

    def take(self, wanted: str = "") -> str:
        """Return the next symbol and go on; it must be ``wanted``, if given."""
        symbol = self.next
        if not symbol or (wanted and symbol != wanted):
            raise _UnreadableError(symbol)
        self.at += 1
        return symbol

    def whole(self) -> str:
        """Return everything as one row."""
        row = self.chain("=")
        if self.next:
            raise _UnreadableError(self.next)
        return row

    def chain(self, signs: str) -> str:
        """Return parts joined by some signs, of the next finer kind."""
        finer = {"=": "<>", "<>": ",", ",": "+-", "+-": "·"}
        parts = []
        if signs == "+-" and self.next == "-":
            parts.append(_sign(self.take()))
        parts.append(self._part(finer.get(signs)))
        while self.next and self.next in signs:
            parts += [_sign(self.take()), self._part(finer.get(signs))]
        return "".join(parts)

    def _part(self, finer: str | None) -> str:
        return self.fraction() if finer is None else self.chain(finer)

    def fraction(self) -> str:
        above, is_bracketed = self.power()
        while self.next == "/":
            self.take()
            below, is_below_bracketed = self.power()
            above = (
                f"<mfrac>{_bare(above, is_bracketed)}{_bare(below, is_below_bracketed)}</mfrac>"
            )
            is_bracketed = False
        return above

    def power(self) -> tuple[str, bool]:
        base, is_bracketed = self.atom()
        if self.next in POWERS:
            return f"<msup>{base}<mn>{POWERS[self.take()]}</mn></msup>", False
        if self.next == "^":
            self.take()
            return f"<msup>{base}{self.atom()[0]}</msup>", False
        return base, is_bracketed

    def atom(self) -> tuple[str, bool]:
        """Return a name, a number, a call or a bracket as one row, and whether it is a bracket."""
        symbol = self.take()
        if symbol == "(":
            inner = self.chain(",")
            self.take(")")
            return f"<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>", True
        if symbol[0].isdigit():
            return f"<mn>{symbol}</mn>", False
        if not (symbol[0].isalpha() or symbol[0] == "_") or symbol in WORDS:
            raise _UnreadableError(symbol)
        if self.next == "(":
            self.take()
            inner = self.chain(",")
            self.take(")")
            if symbol == "sqrt":
                return f"<msqrt>{inner}</msqrt>", False
            return f"<mrow>{_name(symbol)}<mo>(</mo>{inner}<mo>)</mo></mrow>", False
        return _name(symbol), False


def _bare(row: str, is_bracketed: bool) -> str:  # noqa: FBT001 -- of a pair with its row
    """Return a row without the brackets that a fraction's line makes needless."""
    if not is_bracketed:
        return row
    return f"<mrow>{row.removeprefix('<mrow><mo>(</mo>').removesuffix('<mo>)</mo></mrow>')}</mrow>"


def _sign(sign: str) -> str:
    return f"<mo>{escape(SIGNS.get(sign, sign))}</mo>"


def _name(name: str) -> str:
    base, _, below = name.partition("_")
    if not base or not below:
        return f"<mi>{escape(name)}</mi>"
    return f"<msub><mi>{escape(base)}</mi><mi>{escape(below.replace('_', ' '))}</mi></msub>"


def mathml(equation: str) -> SafeString:
    """Return an equation as MathML with its text as annotation; one in words stays text."""
    found = CONDITION.search(equation)
    formula = equation[: found.start()] if found else equation
    condition = equation[found.start() :] if found else ""
    try:
        row = _Reader(formula).whole()
    except _UnreadableError:
        return escape(equation)
    words = f'<annotation encoding="text/plain">{escape(equation)}</annotation>'
    math = f"<math><semantics><mrow>{row}</mrow>{words}</semantics></math>"
    return mark_safe(f"{math}{escape(condition)}")  # noqa: S308 -- every part is escaped or a tag of ours
