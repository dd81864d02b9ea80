"""Parser for untrusted YAML of plain values, in bounded time and memory.

Accepts strings, numbers, true, false, null, lists and mappings with string keys; dates stay strings. Tags
that construct other objects are refused, as are anchors that contain themselves or expand beyond the limits.
"""

from typing import Any

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from cofima.core.names import shortened

MOST_CHARACTERS = 1_000_000
MOST_VALUES = 100_000
DEEPEST = 40
_LONGEST_NUMBER = 100
_BASE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tens of times faster, if it is installed
_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map", "merge")


class YamlError(ValueError):
    """Error for text that is not plain YAML, with the reason in one line."""


class _Loader(_BASE):  # type: ignore[misc, valid-type]
    """Loader that constructs plain values only."""


_Loader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in _PLAIN]
    for start, resolvers in _BASE.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: build
    for tag, build in _BASE.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _PLAIN
}


def parse(text: str, most: int = MOST_CHARACTERS) -> Any:
    """Parse a text of at most ``most`` characters; raise :class:`YamlError` if it is not plain YAML."""
    if len(text) > most:
        raise YamlError(f"{len(text):,} characters are more than {most:,}")
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _Bounds(most).measure(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except YamlError:
        raise
    except yaml.YAMLError as error:
        raise YamlError(_reason(error)) from error
    except Exception as error:  # PyYAML does not check values against tags: int(text) and the like may raise
        raise YamlError(f"a value is not what its tag says ({shortened(str(error))})") from error


def _check_depth(text: str) -> None:
    """Raise if the nesting would exhaust the stack of the recursive composer."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise YamlError(f"nested more than {DEEPEST} levels deep")


class _Bounds:
    """Size and depth of nodes, with aliases expanded."""

    def __init__(self, most: int) -> None:
        self.most = max(MOST_VALUES, most // 10)  # a list of names has a value for every few characters
        self.known: dict[int, tuple[int, int] | None] = {}

    def measure(self, node: Node) -> tuple[int, int]:
        """Return the number of values below a node, and its depth; raise if they exceed the limits."""
        if id(node) in self.known:  # an alias
            found = self.known[id(node)]
            if found is None:
                raise YamlError(f"an anchor contains itself{_at(node)}")
            return found
        self.known[id(node)] = None
        size, depth = 1, 0
        for child in self._children(node):
            inner, below = self.measure(child)
            size, depth = size + inner, max(depth, below + 1)
        if size > self.most:
            raise YamlError(f"more than {self.most:,} values, with what aliases stand for")
        if depth > DEEPEST:
            raise YamlError(f"nested more than {DEEPEST} levels deep, with what aliases stand for")
        self.known[id(node)] = size, depth
        return size, depth

    def _children(self, node: Node) -> list[Node]:
        if isinstance(node, MappingNode):
            for key, _ in node.value:
                if not isinstance(key, ScalarNode) or key.tag.rpartition(":")[2] not in ("str", "merge"):
                    shown = key.value if isinstance(key, ScalarNode) else "a list or mapping"
                    raise YamlError(f"{shortened(str(shown))} is not a name: a key must be a text{_at(key)}")
            return [part for pair in node.value for part in pair]
        if isinstance(node, CollectionNode):
            return list(node.value)
        if node.tag.rpartition(":")[2] in ("int", "float") and len(node.value) > _LONGEST_NUMBER:
            raise YamlError(f"a number of {len(node.value):,} characters{_at(node)}")
        return []


def _at(node: Node) -> str:
    return f" (line {node.start_mark.line + 1})"


def _reason(error: yaml.YAMLError) -> str:
    """Return the problem and its line, without the several lines of context."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    mark = getattr(error, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{shortened(' '.join(str(problem).split()), 160)}{place}"
