"""Topics in Spark: read and write them as tables and streams, run pipelines over them, and jobs over their history.

Programs import from here alone; the modules below are Forebay's own. The only room that knows Spark.
`forebay.spark.session()` gives a session to begin with; any other finds the source by the name "forebay" once the
package is installed.
"""

from __future__ import annotations

import importlib as _importlib
import sys as _sys
import typing as _typing

from forebay.spark.start.quiet import quieten as _quieten

if _typing.TYPE_CHECKING:
    from forebay.compacting.planning import Rules
    from forebay.spark import pipelines
    from forebay.spark.jobs.backfill import Files, Frame, Table
    from forebay.spark.jobs.backfill import run as backfill
    from forebay.spark.jobs.compaction import run as compact
    from forebay.spark.jobs.lake import run as lake
    from forebay.spark.jobs.migrate import run as migrate
    from forebay.spark.jobs.profile import run as profile
    from forebay.spark.jobs.register import run as register
    from forebay.spark.jobs.reindex import run as reindex
    from forebay.spark.jobs.report import JobReport
    from forebay.spark.jobs.scrub import run as scrub
    from forebay.spark.place.location import Location
    from forebay.spark.reading.as_frame import read
    from forebay.spark.source import ForebayDataSource
    from forebay.spark.start.session import session
    from forebay.spark.tables.as_frame import table
    from forebay.spark.tables.catalog import open_catalog
    from forebay.spark.writing.from_frame import write

__all__ = [
    "Files",
    "ForebayDataSource",
    "Frame",
    "JobReport",
    "Location",
    "Rules",
    "Table",
    "backfill",
    "compact",
    "lake",
    "migrate",
    "open_catalog",
    "pipelines",
    "profile",
    "read",
    "register",
    "reindex",
    "scrub",
    "session",
    "table",
    "write",
]

_HOMES = {
    "Files": "forebay.spark.jobs.backfill:Files",
    "ForebayDataSource": "forebay.spark.source:ForebayDataSource",
    "Frame": "forebay.spark.jobs.backfill:Frame",
    "JobReport": "forebay.spark.jobs.report:JobReport",
    "Location": "forebay.spark.place.location:Location",
    "Rules": "forebay.compacting.planning:Rules",
    "Table": "forebay.spark.jobs.backfill:Table",
    "backfill": "forebay.spark.jobs.backfill:run",
    "compact": "forebay.spark.jobs.compaction:run",
    "lake": "forebay.spark.jobs.lake:run",
    "migrate": "forebay.spark.jobs.migrate:run",
    "open_catalog": "forebay.spark.tables.catalog:open_catalog",
    "pipelines": "forebay.spark.pipelines:",
    "profile": "forebay.spark.jobs.profile:run",
    "read": "forebay.spark.reading.as_frame:read",
    "register": "forebay.spark.jobs.register:run",
    "reindex": "forebay.spark.jobs.reindex:run",
    "scrub": "forebay.spark.jobs.scrub:run",
    "session": "forebay.spark.start.session:session",
    "table": "forebay.spark.tables.as_frame:table",
    "write": "forebay.spark.writing.from_frame:write",
}
"""Where the public names live, each as module:name."""

# Here, for each worker that runs a part of Forebay imports this first.
_quieten(_sys.modules["__main__"])

if not _typing.TYPE_CHECKING:  # else a misspelt name would pass for one that is found here

    def __getattr__(name: str) -> object:
        """Load a module when its first name is asked for: a task that reads needs few of them."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _HOMES[name].partition(":")
        home = _importlib.import_module(module)
        found: object = getattr(home, attribute) if attribute else home
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
