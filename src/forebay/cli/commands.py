"""How a command is made: common options on each, examples in its help, errors turned into one line and a code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from forebay.cli.failures import (
    INTERRUPTED,
    INVALID,
    UNAVAILABLE,
    complain,
    exit_code,
    silence,
    unwritten,
)
from forebay.cli.interruptions import Interrupted
from forebay.cli.invocation import Invocation, Options
from forebay.cli.logs import LogFormat, logging_to_stderr
from forebay.cli.options import (
    AssignmentsOption,
    DirectoryOption,
    LogFormatOption,
    RefusedUrlOption,
    SettingsOption,
    UrlOption,
    VerboseOption,
)
from forebay.cli.terminal import flush
from forebay.errors import ForebayError

Body = Callable[..., int | None]
"""What a command does: takes the invocation and its own options, returns an exit code or nothing for 0."""

COMMON: dict[str, Any] = {
    "directory": DirectoryOption,
    "broker_url": UrlOption,
    "settings_file": SettingsOption,
    "assignments": AssignmentsOption,
    "log_format": LogFormatOption,
    "verbose": VerboseOption,
}
_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's family of usage errors, which typer does not name."""


class Commands(TyperGroup):
    """A group whose usage errors are one line too, and whose help lists commands by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The words of the commands, sorted: modules are imported in no order that says anything."""
        return sorted(super().list_commands(ctx))

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run and leave the process with the exit code."""
        options["standalone_mode"] = False
        try:
            code = super().main(*arguments, **options)
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            path = context.command_path if context is not None else "forebay"
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                complain(f'{error.format_message()} (see "{path} --help")')
            sys.exit(2)
        except typer.Abort:
            complain("not done")
            sys.exit(1)
        except OSError as error:
            # No command has begun: it was its help.
            sys.exit(unwritten(error))
        sys.exit(code if isinstance(code, int) else 0)


root = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""`forebay` itself: what its commands of one word are registered with."""


def group(name: str, *, help: str) -> typer.Typer:
    """`forebay NAME`: what its commands are registered with."""
    made = typer.Typer(name=name, cls=Commands, no_args_is_help=True, rich_markup_mode=None, help=help)
    root.add_typer(made, name=name)
    return made


def command(
    app: typer.Typer,
    name: str,
    *,
    examples: Sequence[str],
    by_url: bool = False,
    formerly: typer.Typer | None = None,
) -> Callable[[Body], Body]:
    """Register a command. Its docstring and the examples are its help; `by_url` says that it can ask a broker.

    `formerly` is the group that it was in once. It goes on working there, unlisted, and says its new words.
    """

    def register(body: Body) -> Body:
        text = _help(body, examples)
        app.command(name, help=text)(_invocable(body, by_url=by_url))
        if formerly is not None:
            old, new = (f"forebay {one.info.name} {name}" for one in (formerly, app))
            note = f'"{old}" is now "{new}"; the old words go on working'
            formerly.command(name, help=f'Now "{new}".\n\n{text}', hidden=True)(
                _invocable(body, by_url=by_url, note=note)
            )
        return body

    return register


def _invocable(body: Body, *, by_url: bool, note: str | None = None) -> Callable[..., None]:
    """A function for typer that has the common options as well as those of the command. It says the note first."""
    own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]

    def invoke(ctx: typer.Context, **given: Any) -> None:
        if note is not None:
            complain(note)
        common = Options(**{name: given.pop(name) for name in COMMON if given[name] is not None})
        given = {name: value for name, value in given.items() if name not in COMMON}
        outer = ctx.find_root().obj
        options = common.over(outer if isinstance(outer, Options) else Options())
        raise typer.Exit(_run(body, options, given, by_url=by_url))

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    common = COMMON if by_url else {**COMMON, "broker_url": RefusedUrlOption}
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in common.items()
    ]
    parameters = [context, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *shared]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {one.name: one.annotation for one in parameters}
    invoke.__wrapped__ = body  # type: ignore[attr-defined]
    return invoke


def _help(body: Body, examples: Sequence[str]) -> str:
    shown = "\n".join(f"  {example}" for example in examples)
    return f"{inspect.getdoc(body)}\n\n\b\nExamples:\n{shown}"


def _run(body: Body, options: Options, arguments: dict[str, Any], *, by_url: bool) -> int:
    """Run a command; whatever it ends in is an exit code, and at most one line on stderr."""
    invocation = Invocation(options=options)
    log_format, verbose = options.log_format or LogFormat.TEXT, bool(options.verbose)
    with logging_to_stderr(log_format, verbose=verbose), invocation.interruptions.heeded():
        try:
            if not by_url:
                invocation.check_local()
            code = body(invocation, **arguments)
            flush()
            return code or 0
        except BrokenPipeError as error:
            return unwritten(error)
        except KeyboardInterrupt as interrupt:
            _flush()
            return interrupt.exit_code if isinstance(interrupt, Interrupted) else INTERRUPTED
        except ForebayError as error:
            _flush()
            complain(str(error))
            return exit_code(error)
        except ModuleNotFoundError as error:
            from forebay.cli.extras import extra_with

            extra = extra_with(error.name or "")
            if extra is None:
                raise
            _flush()
            complain(f'this needs the package {error.name}, which is not installed: pip install "forebay[{extra}]"')
            return INVALID
        except OSError as error:
            _flush()
            complain(f"the system refused: {error}")
            return UNAVAILABLE


def _flush() -> None:
    """What was found before an error is shown before it."""
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)
