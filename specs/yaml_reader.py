"""A strict reader of YAML 1.2 (and so of JSON) that remembers the place of every value.

Contract: `read_yaml` never builds an object, never recurses and never expands: it reads ruamel.yaml's parser events
one by one and stops at the first byte, node, alias or depth over the limit. One document; string keys; no duplicate
keys, no tags, no merge keys (`<<`), no alias to something unfinished. What is refused is reported with its place, and
reading goes on where it can, so that one run shows all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moegraph.errors import Problem
from moegraph.specs.nodes import Limits, Mapping, Mark, Node, Scalar, Sequence, show
from moegraph.specs.scalars import resolve


class _Unreadable(Exception):
    """Reading cannot go on."""

    def __init__(self, code: str, mark: Mark, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.problem = problem_at(mark, code, message, fix=fix)


def problem_at(mark: Mark, code: str, message: str, **parts: Any) -> Problem:
    """A Problem that stands at `mark`."""
    file = mark.origin if mark.line else ""
    return Problem(code, message, where=str(mark), file=file, line=mark.line, column=mark.column, **parts)


def read_yaml(
    data: bytes | str,
    origin: str,
    problems: list[Problem],
    limits: Limits,
    *,
    in_file: bool = True,
    trusted: bool = False,
) -> Node | None:
    """The tree of one YAML document, or None if it could not be read to its end.

    `origin` names the source in marks (with `in_file`, followed by line and column; otherwise what a person gave
    directly). Whatever is refused is added to `problems`.
    """
    try:
        text = _decode(data, origin, limits)
        return _Composer(origin, limits, problems, in_file, trusted).compose(text)
    except _Unreadable as error:
        problems.append(error.problem)
        return None


def _decode(data: bytes | str, origin: str, limits: Limits) -> str:
    size = len(data)
    if size > limits.bytes:
        raise _Unreadable("MG108", Mark(origin), f"a spec may have at most {limits.bytes:,} bytes; this has more")
    if isinstance(data, str):
        return data
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        mark = Mark(origin, line, column)
        message = f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8"
        raise _Unreadable("MG102", mark, message, "save the file as UTF-8") from None
    for index, character in enumerate(text):
        if not (character.isprintable() or character in "\t\n\r\x85\xa0\u2028\u2029 " or character > "\x9f"):
            line, column = text.count("\n", 0, index) + 1, index - (text.rfind("\n", 0, index) + 1) + 1
            raise _Unreadable("MG102", Mark(origin, line, column), f"control character U+{ord(character):04X}")
    return text


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been read."""

    mark: Mark
    is_mapping: bool
    anchor: str | None
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Mark] = field(default_factory=dict)
    key: str | None = None
    key_mark: Mark | None = None  # None: the next node is a key
    skipped: bool = False  # the value of a refused key is read and dropped

    def size(self) -> int:
        return 1 + sum(node.size for node in (self.entries.values() if self.is_mapping else self.items))

    def close(self) -> Node:
        if self.is_mapping:
            return Mapping(self.entries, self.mark, self.keys, self.size())
        return Sequence(tuple(self.items), self.mark, self.size())


@dataclass(slots=True)
class _Composer:
    origin: str
    limits: Limits
    problems: list[Problem]
    in_file: bool
    trusted: bool
    stack: list[_Open] = field(default_factory=list)
    anchors: dict[str, Node | None] = field(default_factory=dict)
    count: int = 0
    aliases: int = 0
    documents: int = 0
    root: Node | None = None

    def compose(self, text: str) -> Node:
        for event in _events(text, self.mark):
            handler = getattr(self, f"_on_{type(event).__name__}", None)
            if handler is not None:
                handler(event)
        if self.root is None:
            return Scalar(None, Mark(self.origin, 1, 1) if self.in_file else Mark(self.origin, trusted=True))
        return self.root

    def mark(self, position: Any) -> Mark:
        if not self.in_file:
            return Mark(self.origin, trusted=True)
        return Mark(self.origin, position.line + 1, position.column + 1, self.trusted)

    def _on_DocumentStartEvent(self, event: Any) -> None:
        self.documents += 1
        if self.documents > 1:
            message = "a second document starts here, and a spec is one document"
            raise _Unreadable("MG102", self.mark(event.start_mark), message, "remove this `---` and what follows")
        if event.tags:
            raise _Unreadable("MG102", self.mark(event.start_mark), "%TAG directives are refused, as all tags are")
        if event.version not in (None, (1, 2)):
            major, minor = event.version
            message = f"%YAML {major}.{minor} is refused: specs are read as YAML 1.2"
            raise _Unreadable("MG102", self.mark(event.start_mark), message, "remove the %YAML line")

    def _on_ScalarEvent(self, event: Any) -> None:
        mark = self._enter(event)
        is_plain = event.style is None or event.style == ""
        if not is_plain:
            self._add(Scalar(event.value, mark), event.anchor)
            return
        try:
            self._add(Scalar(resolve(event.value), mark, event.value), event.anchor)
        except ValueError as error:
            self._refuse(mark, str(error))
            self._add(Scalar(event.value, mark, event.value), event.anchor)

    def _on_MappingStartEvent(self, event: Any) -> None:
        self._open(event, is_mapping=True)

    def _on_SequenceStartEvent(self, event: Any) -> None:
        self._open(event, is_mapping=False)

    def _on_MappingEndEvent(self, event: Any) -> None:
        self._close()

    def _on_SequenceEndEvent(self, event: Any) -> None:
        self._close()

    def _on_AliasEvent(self, event: Any) -> None:
        mark = self.mark(event.start_mark)
        self.aliases += 1
        if self.aliases > self.limits.aliases:
            raise _Unreadable("MG108", mark, f"more than {self.limits.aliases} aliases")
        node = self.anchors.get(event.anchor)
        if node is None:
            inside = event.anchor in self.anchors
            what = "stands inside what it refers to" if inside else "refers to an anchor that was not defined before"
            self._refuse(mark, f"the alias *{show(event.anchor)} {what}")
            node = Scalar(None, mark)
        self.count += node.size
        self._check_count(mark)
        self._add(node, None)

    def _enter(self, event: Any) -> Mark:
        """Count a node and refuse its tag."""
        mark = self.mark(event.start_mark)
        self.count += 1
        self._check_count(mark)
        tag = event.tag
        if tag is not None:
            self._refuse(
                mark, f"the tag {show(str(tag))} is refused: a spec holds plain values, never objects", "remove the tag"
            )
        return mark

    def _check_count(self, mark: Mark) -> None:
        if self.count > self.limits.nodes:
            raise _Unreadable("MG108", mark, f"more than {self.limits.nodes:,} values, aliases written out")

    def _open(self, event: Any, *, is_mapping: bool) -> None:
        mark = self._enter(event)
        if len(self.stack) >= self.limits.depth:
            raise _Unreadable("MG108", mark, f"nested more than {self.limits.depth} levels deep")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Open(mark, is_mapping, event.anchor))

    def _close(self) -> None:
        done = self.stack.pop()
        self._add(done.close(), done.anchor)

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self.anchors[anchor] = node
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if not parent.is_mapping:
            parent.items.append(node)
        elif parent.key_mark is None:
            self._add_key(parent, node)
        else:
            if not parent.skipped and parent.key is not None:
                parent.entries[parent.key] = node
                parent.keys[parent.key] = parent.key_mark
            parent.key_mark, parent.key, parent.skipped = None, None, False

    def _add_key(self, parent: _Open, node: Node) -> None:
        parent.key_mark = node.mark
        parent.skipped = True
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            shown = show(node.value) if isinstance(node, Scalar) else "a list or mapping"
            self._refuse(node.mark, f"a key must be a name, this is {shown}", "put quotes around it if it is a name")
        elif node.value == "<<" and node.text is not None:
            self._refuse(node.mark, "merge keys (<<) are refused", "write the keys out, or use `extends:`")
        elif node.value in parent.entries:
            first = parent.keys[node.value]
            place = f"line {first.line}, column {first.column}" if first.line else "before"
            self._refuse(
                node.mark, f"the key `{show(node.value)}` stands here twice, first at {place}", "keep one of them"
            )
        else:
            parent.key, parent.skipped = node.value, False

    def _refuse(self, mark: Mark, message: str, fix: str | None = None) -> None:
        self.problems.append(problem_at(mark, "MG102", message, fix=fix))


def _events(text: str, mark: Any) -> Iterator[Any]:
    """ruamel.yaml's parser events; anything its scanner cannot take becomes a problem with a place."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        place = mark(error.problem_mark or error.context_mark)
        raise _Unreadable("MG102", place, *_explain(error)) from None
    except (YAMLError, ValueError, LookupError, TypeError, AttributeError, AssertionError, OverflowError) as error:
        # ruamel.yaml lets a few of these through on malformed escapes and directives.
        raise _Unreadable("MG102", mark(_Start), f"cannot be read as YAML ({type(error).__name__})") from None


class _Start:
    line = 0
    column = 0


_EXPLANATIONS = (
    ("mapping values are not allowed", "a `:` that cannot stand here", "put quotes around a value that contains `: `"),
    ("'\\t'", "a tab where YAML wants spaces", "indent with spaces"),
    ("could not find expected ':'", "a key without `:`", "write `key: value`, and quote text of several lines"),
    ("expected ',' or", "a list or mapping in brackets is not closed, or a comma is missing", None),
    ("<block end>", "the indentation does not fit what is above", "align the keys of one mapping"),
    ("<stream end>", "the text ends in the middle of a value", "close every bracket and quote"),
    ("end of stream", "the text ends in the middle of a value", "close every bracket and quote"),
    ("escape", "an unknown escape sequence in double quotes", "use single quotes for text with backslashes"),
    ("cannot start any token", "a character that cannot start a value", "put quotes around the value"),
    ("alias", "an alias (`*name`) without a proper name", "put quotes around a value that starts with `*`"),
    ("anchor", "an anchor (`&name`) without a proper name", "put quotes around a value that starts with `&`"),
    ("tag", "a malformed tag", "put quotes around a value that starts with `!`"),
)


def _explain(error: Any) -> tuple[str, str | None]:
    said = f"{error.problem or ''} {error.context or ''}"
    for needle, sentence, fix in _EXPLANATIONS:
        if needle in said:
            return f"cannot be read as YAML: {sentence}", fix
    return f"cannot be read as YAML: {said.strip()}", None
