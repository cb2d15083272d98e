"""Looking into a data directory: dump every kind of file, verify all of it, repair what is derived.

Knows the log, the formats, the disk and the metadata store; knows no terminal and prints nothing. Verifying
and dumping change nothing and may run beside the owner; repairing holds the directory's lock.
"""

from forebay.inspection.directory import ExpectedShard, Inspected
from forebay.inspection.dump import dump, dump_catalog, dump_metadata
from forebay.inspection.findings import Finding, Report, Severity
from forebay.inspection.outlook import Outlook, outlook
from forebay.inspection.repair import repair
from forebay.inspection.steps import CHANGES, Action, Step
from forebay.inspection.verify import segment_bytes, verify

__all__ = [
    "CHANGES",
    "Action",
    "Finding",
    "Inspected",
    "Outlook",
    "Report",
    "Severity",
    "ExpectedShard",
    "Step",
    "dump",
    "dump_catalog",
    "dump_metadata",
    "outlook",
    "repair",
    "segment_bytes",
    "verify",
]
