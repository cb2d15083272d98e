"""`forebay doctor`: is this machine fit, and is the directory in order? Answers, not guesses."""

from __future__ import annotations

from forebay.cli.commands import command, root
from forebay.cli.failures import PROBLEM
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson
from forebay.cli.terminal import draws, say, say_json, say_table


@command(root, "doctor", examples=["forebay doctor", "forebay doctor --data /var/lib/forebay --json"])
def doctor(run: Invocation, *, as_json: AsJson = False) -> int:
    """Look at the machine, the data directory and what it shares: versions, Java, disk, clock, limits, stores, orphans.

    Writes and removes small files to see how long a sync takes and whether the store keeps its promises. Ends with
    code 1 if something will not work as it is.
    """
    from forebay.cli.doctor.answers import AnswerKind
    from forebay.cli.doctor.probes import examine

    answers = list(examine(run))
    if as_json:
        for answer in answers:
            say_json({"check": answer.check, "verdict": answer.verdict, "answer": answer.answer})
    elif draws():
        say_table(("verdict", "check", "answer"), [(one.verdict, one.check, one.answer) for one in answers])
    else:
        for answer in answers:
            say(f"{answer.verdict:8} {answer.check:14} {answer.answer}")
    return PROBLEM if any(answer.verdict is AnswerKind.PROBLEM for answer in answers) else 0
