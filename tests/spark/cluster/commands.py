"""Commands of Forebay in a process that is a client of Spark Connect: `… -m tests.spark.cluster.commands <JSON>`.

Takes a list of command lines and prints, as JSON, the exit code, the output and the errors of each. A command that
ends by an exception ends the process.
"""

from __future__ import annotations

import json
import sys

from typer.testing import CliRunner

from forebay.cli.app import app

if __name__ == "__main__":
    outcomes = []
    for words in json.loads(sys.argv[1]):
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        outcomes.append((result.exit_code, result.stdout, result.stderr))
    sys.stdout.write(json.dumps(outcomes))
