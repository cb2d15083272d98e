"""A settings file in YAML as a tree. Loaded where there is a file: a task of Spark, for one, seldom has one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from forebay.errors import Invalid


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error and not a silent overwrite."""

    # The signature is PyYAML's.
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            if key is not None:
                seen.add(key)
        return super().construct_mapping(node, deep)


def parse_document(content: str | bytes, source: str) -> object:
    """The tree of a document; `Invalid` that names the source if it is none."""
    try:
        return yaml.load(content, _UniqueKeys)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise Invalid(f"{source} is not YAML: {error}") from error
