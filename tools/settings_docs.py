"""Write docs/settings.md from the declarations in forebay.settings: `python tools/settings_docs.py`."""

from __future__ import annotations

import inspect
from pathlib import Path

from forebay.settings import GROUPS, Setting, settings_of

TARGET = Path(__file__).parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

This page is generated from `src/forebay/settings/groups.py`; change the declarations there, then run
`python tools/settings_docs.py`.

Settings come from a YAML file, from environment variables and from the caller, each overriding the one before:

```yaml
wal:
  sync_interval_ms: 500
metadata:
  path: ${STATE_DIRECTORY}/metadata.sqlite
```

`${NAME}` stands for an environment variable, which must be set; `$${` is a plain `${`. A key that is not
listed here is an error that names it, and so is a value outside its range.
"""


def row(setting: Setting) -> str:
    default = "none" if setting.default in (None, (), {}) else f"`{setting.default}`"
    return (
        f"| `{setting.name}` | {default} | {setting.range} | {setting.unit or '–'} | {setting.meaning} "
        f"| `{setting.environment_name}` |"
    )


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group, kind in GROUPS.items():
        parts.append(f"\n## `{group}`\n\n{inspect.getdoc(kind)}\n")
        parts.append("\n| setting | default | allowed | unit | meaning | variable |\n|---|---|---|---|---|---|\n")
        parts.extend(f"{row(setting)}\n" for setting in settings_of(kind))
    return "".join(parts)


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page(), encoding="utf-8")
