"""`asyncrl init`: a folder to start from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import one_of
from asyncrl_cli.cli.output import echo, echo_json


def _names() -> Iterable[str]:
    from asyncrl_cli.cli.templates import templates

    return [template.name for template in templates()]


def init(
    template: Annotated[
        str | None,
        typer.Argument(
            metavar="TEMPLATE", help="A template's name.", show_default=False, autocompletion=one_of(_names)
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Where to copy it to.", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the templates, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print a JSON list.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty; replaces files of the same name.")
    ] = False,
) -> None:
    """Copy a template, a spec with its code and data, to a new folder, and say what to type next."""
    from asyncrl_cli.cli.templates import SPEC, find, templates

    if show:
        rows = [{"template": template.name, "what": template.title} for template in templates()]
        if as_json:
            echo_json(rows)
            return
        width = max(len(row["template"]) for row in rows)
        for row in rows:
            echo(f"{row['template']:{width}}  {row['what']}")
        return
    if template is None:
        raise typer.BadParameter("name a template, or use --list", param_hint="TEMPLATE")
    found = find(template)
    if folder is None:
        raise typer.BadParameter(f"name a folder: asyncrl init {template} my-task", param_hint="FOLDER")
    files = found.copy(folder, force)
    spec = shlex.quote(str(folder / SPEC))
    echo(f"{folder}: {', '.join(files)}\nnext:\n  asyncrl validate-spec {spec}\n  asyncrl train {spec}")
