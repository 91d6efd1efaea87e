"""The command `quantkit`: finds verbs lazily, and is the one place that turns an error into a sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from quantkit import __version__
from quantkit.cli.output import visible
from quantkit.core.errors import EnvironmentFault, QuantkitError
from quantkit.core.files import is_full

# Each verb is the command of its name in the module of its name; imported when it is used, so that help stays instant.
VERBS = {
    "run": "Make and measure a whole ladder: plan, imatrix, quantize, audit, table.",
    "demo": "The same on a bundled model and text, offline.",
    "doctor": "What would go wrong later, found before any work.",
    "show": "What a GGUF file is, from its header.",
    "plan": "The type that every tensor of a tier gets, by which rule, and the exact size.",
    "imatrix": "Collect an importance matrix; merge or show some.",
    "quantize": "Write one tier, or several side by side.",
    "audit": "Measure files that are there, whoever made them.",
    "mtp": "Split, graft and check MTP heads.",
    "report": "The tables of a run.",
    "compare": "Several runs on one table, and the verdict of every pair.",
    "fit": "The memory that a file needs at a context length.",
    "gate": "Replace what is published only where nothing protected got worse.",
    "verify": "Check a run or a downloaded bundle against its manifest.",
    "split": "Deal a model into shards below a size.",
    "merge": "Put a split model together again.",
    "publish": "Send a run's bundle to the hub; without --yes, list it.",
    "fetch": "Download a published bundle and verify it.",
    "remote": "Look at a repository's models by their headers.",
    "search": "Find the plan that keeps the most in a number of bytes.",
    "refpack": "Make a pack of the base's answers, to audit without it.",
    "protocol": "Show, check and lock protocols.",
}
_EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are modules that load when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order in which a newcomer meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb's module."""
        if cmd_name not in VERBS:
            return None
        command = getattr(importlib.import_module(f"quantkit.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs with their first line of help."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="quantkit")
def cli() -> None:
    """Quantize one BF16 GGUF into a ladder of tiers under a frozen protocol, and measure what each tier keeps."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a check said no, 2 wrong input, 3 this machine cannot."""
    if arguments is None and sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # a locale of ASCII alone takes file names apart; the mode can only be chosen at the start, and workers inherit it
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        result: Any = cli.main(args=arguments, prog_name="quantkit", standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except QuantkitError as error:
        lines = "\n".join(visible(line) for line in str(error).splitlines())
        click.echo(f"quantkit: {lines}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        click.echo("quantkit: interrupted; the same command goes on where this one stopped", err=True)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader went away; the flush at exit must not complain
        return 0
    except OSError as error:
        click.echo(f"quantkit: {visible(_os_error(error))}", err=True)
        return EnvironmentFault.exit_code


def _os_error(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    if is_full(error):
        return f"the disk is full{where}: free some space and run again"
    return f"the system refused{where}: {error.strerror or error}"


if __name__ == "__main__":
    main()
