"""Options that are given as NAME=VALUE."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay.errors import Invalid


def assigned(
    option: str, given: Iterable[str] | None, *, example: str, is_name: Callable[[str], bool] = bool
) -> dict[str, str]:
    """What is given as `--option NAME=VALUE`, by name; later ones win. `Invalid` names the one that is not so."""
    values = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not is_name(name.strip()):
            raise Invalid(f"{option} {one!r:.100} is not NAME=VALUE, as in {option} {example}")
        values[name.strip()] = value.strip()
    return values
