"""Topics as Spark tables: plan which offsets each task reads, and read them as Arrow.

The only room that knows Spark. `forebay.spark.session()` gives a session to begin with; any other finds the
source by the name "forebay" once the package is installed.
"""

from forebay.spark.frames import read
from forebay.spark.session import session
from forebay.spark.table import table

__all__ = ["read", "session", "table"]
