"""A YAML file read with the place of every word, so that whatever is wrong with one can be said with its line.

Knows YAML and nothing of what the words mean. Everything wrong is collected, not only the first of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import msgspec
import yaml

from forebay.errors import Invalid
from forebay.settings.sources import FILE_BYTES_MAX

T = TypeVar("T")

_NULL: Final = "tag:yaml.org,2002:null"
_TRUTHS: Final = {"true": True, "false": False}
_LITERAL: Final = "|"
_DURATION: Final = re.compile(
    r"(\d+\s*(ms|milliseconds?|seconds?|minutes?|hours?|days?|weeks?)\s*)+", re.IGNORECASE | re.ASCII
)
_NAMED_OPTION: Final = re.compile(r'option "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Place:
    """Where a word stands: lines and columns count from 1, as editors do."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Word(str):
    """A text with the place where it was written."""

    place: Place
    _lines_at: tuple[int, int] | None
    """For a block of lines: the line of the first of them, and how far they are indented."""
    _text_at: int | None
    """For one line that stands as it is: the column where it begins."""

    def __new__(cls, text: str, place: Place) -> Word:
        word = super().__new__(cls, text)
        word.place, word._lines_at, word._text_at = place, None, None
        return word

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Where it is sent to, its place is not asked for.
        return (str, (str(self),))

    @classmethod
    def of(cls, node: yaml.ScalarNode, file: str) -> Word:
        """The word that a node holds."""
        place = _place(node, file)
        word = cls(node.value, place)
        if node.style == _LITERAL:
            written = node.start_mark.buffer
            word._lines_at = (place.line + 1, _indent(written, node) if written is not None else 0)
        elif node.start_mark.line == node.end_mark.line:
            word._text_at = place.column + (1 if node.style in ("'", '"') else 0)
        return word

    def place_of(self, line: int, column: int) -> Place:
        """Where the given line and column of the text, both counted from 1, stand in the file, as far as is known."""
        if self._lines_at is not None:
            first, indent = self._lines_at
            return Place(self.place.file, first + line - 1, indent + column)
        if self._text_at is not None and line == 1:
            return Place(self.place.file, self.place.line, self._text_at + column - 1)
        return self.place


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that is wrong."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class Flawed(Invalid):
    """A file that cannot be taken as it is. `flaws` are all that is wrong, by line."""

    @property
    def flaws(self) -> tuple[str, ...]:
        """One line for each."""
        return tuple(str(flaw) for flaw in self.args)

    def __str__(self) -> str:
        return "; ".join(self.flaws)


@dataclass
class Flaws:
    """What has been found so far."""

    found: list[Flaw] = field(default_factory=list)

    def add(self, place: Place, text: str) -> None:
        """Note one more."""
        self.found.append(Flaw(place, text))

    def raise_if_any(self) -> None:
        """Raise `Flawed` if anything was found."""
        if self.found:
            raise Flawed(*self.lines())

    def lines(self) -> list[str]:
        """What was found, by line."""
        return [str(flaw) for flaw in sorted(self.found, key=_order)]


def flawed(place: Place, text: str) -> NoReturn:
    """Give up for this one reason."""
    raise Flawed(str(Flaw(place, text)))


def hint(word: str, known: Iterable[str], what: str) -> str:
    """The nearest known word, or all of them."""
    names = list(known)
    by_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), by_case, n=1, cutoff=0.6)
    if near:
        return f"did you mean {by_case[near[0]]}?"
    return f"{what}: {', '.join(names)}" if names else f"there are no {what.removeprefix('the ').rpartition(' ')[0]}"


class Fields:
    """A mapping whose keys are known beforehand; a key that is not, or that comes twice, is noted at once."""

    def __init__(self, node: yaml.Node, file: str, flaws: Flaws, *, what: str, known: Sequence[str]) -> None:
        self.place = _place(node, file)
        self.flaws = flaws
        self.what = what
        self._file = file
        self._nodes: dict[str, yaml.Node] = {}
        self._keys: dict[str, Place] = {}
        if not isinstance(node, yaml.MappingNode):
            flaws.add(self.place, f"{what} is {_shown(node)}: write it as a mapping such as `{known[0]}: …`")
            return
        for key, value in node.value:
            self._take(key, value, known)

    def _take(self, key: yaml.Node, value: yaml.Node, known: Sequence[str]) -> None:
        name, place = str(key.value) if isinstance(key, yaml.ScalarNode) else "", _place(key, self._file)
        if name not in known:
            self.flaws.add(place, f"{name!r} is not known in {self.what}: {hint(name, known, 'the words are')}")
        elif name in self._keys:
            self.flaws.add(place, f"{name} is given twice in {self.what}, first in line {self._keys[name].line}")
        else:
            self._nodes[name], self._keys[name] = value, place

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def place_of(self, name: str) -> Place:
        """Where the key stands; the mapping, if it does not."""
        return self._keys.get(name, self.place)

    def node(self, name: str) -> yaml.Node | None:
        """The value as it stands."""
        return self._nodes.get(name)

    def required(self, name: str, example: str) -> Word | None:
        """A text that must be there."""
        if name not in self._nodes:
            self.flaws.add(self.place, f"{name} is missing in {self.what}: write `{name}: {example}`")
            return None
        return self.word(name)

    def word(self, name: str) -> Word | None:
        """A text; `None` if it is not there."""
        node = self._nodes.get(name)
        return None if node is None else self.text_of(node, name)

    def text_of(self, node: yaml.Node, name: str) -> Word | None:
        """The text of a node, which `name` asked for."""
        if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL or not node.value.strip():
            self.flaws.add(_place(node, self._file), f"{name} of {self.what} is {_shown(node)}: write a text")
            return None
        return Word.of(node, self._file)

    def json(self, name: str) -> Word | None:
        """A text, or a mapping, which is the same as its JSON."""
        node = self._nodes.get(name)
        if not isinstance(node, yaml.MappingNode):
            return self.word(name)
        value = yaml.SafeLoader("").construct_document(node)
        return Word(msgspec.json.encode(value).decode(), _place(node, self._file))

    def choice(self, name: str, known: Mapping[str, T], default: T) -> T:
        """One of a few words."""
        word = self.word(name)
        if word is None:
            return default
        if word not in known:
            self.flaws.add(word.place, f"{name} of {self.what} is {str(word)!r}: {hint(word, known, 'the words are')}")
            return default
        return known[word]

    def is_one_of(self, name: str, known: Mapping[str, object]) -> bool:
        """Whether `choice` finds a word that it knows, or none. Else what follows from its default is no flaw."""
        word = self.word(name)
        return word is None or word in known

    def truth(self, name: str, *, default: bool) -> bool:
        """`true` or `false`."""
        return self.choice(name, _TRUTHS, default)

    def duration(self, name: str) -> Word | None:
        """A span of time, as Spark writes it."""
        word = self.word(name)
        if word is not None and not _DURATION.fullmatch(word.strip()):
            self.flaws.add(word.place, f"{name} of {self.what} is {str(word)!r:.80}: write a time such as 10 seconds")
        return word

    def words(self, name: str) -> tuple[Word, ...]:
        """A list of texts; a single text is a list of one."""
        node = self._nodes.get(name)
        if node is None:
            return ()
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not nodes:
            self.flaws.add(_place(node, self._file), f"{name} of {self.what} is an empty list")
        return tuple(word for one in nodes if (word := self.text_of(one, name)) is not None)

    def items(self, name: str, what: str, known: Sequence[str]) -> list[Fields]:
        """A list of mappings."""
        node = self._nodes.get(name)
        if node is None:
            return []
        if not isinstance(node, yaml.SequenceNode):
            self.flaws.add(
                _place(node, self._file), f"{name} is {_shown(node)}: write a list, each item with `- name:`"
            )
            return []
        return [Fields(one, self._file, self.flaws, what=what, known=known) for one in node.value]

    def mapping(self, name: str, what: str, known: Sequence[str]) -> Fields | None:
        """A mapping with known keys."""
        node = self._nodes.get(name)
        return None if node is None else Fields(node, self._file, self.flaws, what=what, known=known)

    def options(self, name: str) -> dict[Word, Word]:
        """A mapping of texts whose keys this module does not know."""
        node = self._nodes.get(name)
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            self.flaws.add(
                _place(node, self._file), f"{name} of {self.what} is {_shown(node)}: write `NAME: VALUE` lines"
            )
            return {}
        taken: dict[Word, Word] = {}
        for key, value in node.value:
            option = self.text_of(key, name)
            text = self.text_of(value, f"{option} in {name}") if option is not None else None
            if option in taken:
                self.flaws.add(_place(key, self._file), f"{option} is given twice in {name} of {self.what}")
            elif option is not None and text is not None:
                taken[option] = text
        return taken


def option_place(options: Mapping[Word, Word], message: str) -> Place | None:
    """Where the option stands that a message names; else the first of them."""
    named = _NAMED_OPTION.search(message)
    lowered = {name.lower(): name.place for name in options}
    if named is not None and named[1].lower() in lowered:
        return lowered[named[1].lower()]
    return next(iter(lowered.values()), None)


def read_document(path: str, flaws: Flaws, *, what: str, known: Sequence[str]) -> Fields:
    """The file as a mapping with these keys; what it holds is checked as it is taken."""
    node = _composed(path)
    if node is None:
        flawed(Place(path, 1, 1), f"the file is empty: write at least `{known[0]}: …`")
    return Fields(node, path, flaws, what=what, known=known)


def _composed(path: str) -> yaml.Node | None:
    try:
        content = _content(path)
        # Decoded here, so that places count characters.
        root: yaml.Node | None = yaml.compose(content.decode("utf-8-sig"), yaml.SafeLoader)
        return root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(path, mark.line + 1, mark.column + 1) if mark is not None else Place(path, 1, 1)
        flawed(place, f"this is not YAML: {error.problem or error.context}")
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        flawed(Place(path, 1, 1), f"this is not YAML: {error}")


def _content(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise Invalid(f"{path} is larger than {FILE_BYTES_MAX} bytes: is it the right file?")
    return content


def _place(node: yaml.Node, file: str) -> Place:
    return Place(file, node.start_mark.line + 1, node.start_mark.column + 1)


def _indent(written: str, node: yaml.ScalarNode) -> int:
    """How far the first line of a block that holds something is indented."""
    for line in written.splitlines()[node.start_mark.line + 1 :]:
        if line.strip():
            return len(line) - len(line.lstrip(" "))
    return 0


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "empty" if node.tag == _NULL or not str(node.value).strip() else f"{node.value!r:.80}"


def _order(flaw: Flaw) -> tuple[int, int]:
    return flaw.place.line, flaw.place.column
