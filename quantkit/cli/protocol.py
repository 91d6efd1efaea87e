"""`quantkit protocol`: show, check and lock protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from quantkit.cli.output import format_option, json_text, render_table


@click.group()
def protocol() -> None:
    """Show, check and lock the files that say what is measured, and how."""


@protocol.command()
@click.argument("protocol", metavar="PROTOCOL")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="Derive a protocol: another value for one key. It has its own ids and is marked in every table.")
@click.option("--format", "output_format", type=click.Choice(["toml", "json"]), default="toml", show_default=True,
              help="The file itself with its ids as comments, or both as JSON.")
def show(protocol: str, settings: Sequence[str], output_format: str) -> None:
    """Show PROTOCOL, a name or a file, whole and with its ids; what is printed is a valid protocol file."""
    from quantkit.spec.protocol import load_protocol, write_protocol
    from quantkit.spec.protocol_lock import locked_name
    from quantkit.spec.toml_records import record_to_table

    loaded = load_protocol(protocol, settings)
    if output_format == "json":
        click.echo(json_text({"ids": loaded.ids(), "locked": locked_name(loaded), "protocol": record_to_table(loaded)}), nl=False)
        return
    lines = [f"# {key} {value}\n" for key, value in loaded.ids().items()]
    click.echo("".join(lines) + "\n" + write_protocol(loaded).decode(), nl=False)


@protocol.command()
@click.argument("protocols", metavar="[PROTOCOL]...", nargs=-1)
@format_option
def check(protocols: Sequence[str], output_format: str) -> None:
    """Check that every PROTOCOL is valid and agrees with the LOCK beside it; without one, all that come with quantkit."""
    from quantkit.spec.protocol import known_protocols, protocol_path
    from quantkit.spec.protocol_lock import ID_NAMES, lock_state, require_locked

    states = [lock_state(protocol_path(name)) for name in protocols or known_protocols()]
    rows: list[list[Any]] = [[state.protocol.name, "changed" if state.changed else "locked" if state.locked else "not locked",
                              *(state.protocol.ids()[name] for name in ID_NAMES)] for state in states]
    click.echo(render_table(["name", "state", *ID_NAMES], rows, output_format), nl=False)
    for state in states:
        require_locked(state)


@protocol.command()
@click.argument("protocols", metavar="PROTOCOL...", nargs=-1, required=True)
def lock(protocols: Sequence[str]) -> None:
    """Add the ids of every PROTOCOL to the LOCK beside it. What is locked never changes."""
    from quantkit.spec.protocol import protocol_path
    from quantkit.spec.protocol_lock import lock_protocol

    for name in protocols:
        state = lock_protocol(protocol_path(name))
        click.echo(f"{state.protocol.name}: {'was locked already' if state.locked else 'locked'}", err=True)
