"""`asyncrl init`: copies a template to a new folder.

A template is a folder in `templates/` with a spec, the code and data that the spec names, and a README; `--list` shows
the README's heading. An installed wheel has the folders in `asyncrl_cli/_templates`; an editable install uses the
repository's folders.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import asyncrl_cli
from asyncrl_cli.cli.arguments import completion
from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.errors import UserError

SPEC = "spec.yaml"
MODEL = "model"
"""A template's model: config and tokenizer; ``Template.copy`` adds random weights."""
STARTS = {"slurm": ("sbatch", "job.sbatch"), "kuberay": ("kubectl apply -f", "rayjob.yaml")}
"""Command and file that start a run, for cluster templates. `asyncrl train` starts all other templates."""


class TemplateError(UserError):
    """The template does not exist, or the folder must not be overwritten."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Template:
    """A template's folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        return (self.folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")

    @property
    def has_model(self) -> bool:
        return (self.folder / MODEL).is_dir()

    def copy(self, folder: Path, force: bool) -> list[str]:
        """Copy the template to ``folder``, set the spec's ``name`` to the folder's name, and make random weights if the
        template has a model. Returns the names of the written files, including a JSON schema for editors.

        With ``force``, ``folder`` may contain files: files with the same name are replaced, all others are kept. Raises
        ``TemplateError``.
        """
        from asyncrl_cli.spec.schema import FILE, schema_text

        try:
            if folder.exists() and not folder.is_dir():
                raise TemplateError("a file with this name exists", location=str(folder), hint="name a folder")
            if not force and folder.is_dir() and any(folder.iterdir()):
                hint = "name another one, or use --force, which replaces files with the same name"
                raise TemplateError("the folder is not empty", location=str(folder), hint=hint)
            shutil.copytree(self.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            spec = folder / SPEC
            text = re.sub(r"(\$schema=).*", rf"\g<1>{FILE}", spec.read_text(encoding="utf-8"), count=1)
            spec.write_text(_renamed(text, folder.resolve().name), encoding="utf-8")
            (folder / FILE).write_text(schema_text(), encoding="utf-8")
            if self.has_model:
                # Otherwise DeepSpeed, which transformers imports, prints to stdout that it found no accelerator.
                os.environ.setdefault("DS_ACCELERATOR", "cpu")
                from asyncrl_cli.train.model.initial import write_weights

                write_weights(folder / MODEL, seed=0)
        except OSError as error:  # includes copytree's shutil.Error
            raise TemplateError(f"the folder cannot be written: {error}", location=str(folder)) from error
        return sorted([FILE, *(path.name for path in self.folder.iterdir() if path.name != "__pycache__")])


def _renamed(spec: str, folder: str) -> str:
    """Set ``name`` in a spec's text to the folder's name, without characters that a run's name must not have."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:64]
    return re.sub(r"^name: .*$", f'name: "{name}"', spec, count=1, flags=re.MULTILINE) if name else spec


def templates() -> list[Template]:
    package = Path(asyncrl_cli.__file__).parent
    candidates = (package / "_templates", package.parent / "templates")
    folder = next(path for path in candidates if path.is_dir())
    return [Template(path) for path in sorted(folder.iterdir()) if (path / SPEC).is_file()]


def find_template(name: str) -> Template:
    """Return the template with this name. Raises ``TemplateError`` with the most similar name if there is none."""
    from asyncrl_cli.core.suggest import did_you_mean

    templates_by_name = {template.name: template for template in templates()}
    if name in templates_by_name:
        return templates_by_name[name]
    hint = did_you_mean(name, templates_by_name, f"templates: {', '.join(templates_by_name)}")
    raise TemplateError(f"no template is called {name!r}", hint=hint)


def init(
    template: Annotated[
        str | None,
        typer.Argument(
            metavar="TEMPLATE",
            help="The template.",
            show_default=False,
            autocompletion=completion(lambda: [listed.name for listed in templates()]),
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="The folder to create.", show_default=False)
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the templates and exit.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty; replaces files with the same name.")
    ] = False,
) -> None:
    """Copy a template (a spec with its code and data) to a new folder, and print the next commands."""
    if show_list:
        width = max(len(listed.name) for listed in templates())
        for listed in templates():
            echo(f"{listed.name:{width}}  {listed.title}")
        return
    if template is None:
        raise typer.BadParameter("name a template, or use --list", param_hint="TEMPLATE")
    source = find_template(template)
    if folder is None:
        raise typer.BadParameter(f"name a folder: asyncrl init {template} my-task", param_hint="FOLDER")
    files = source.copy(folder, force)
    command, file = STARTS.get(template, ("asyncrl train", SPEC))
    spec, started = (shlex.quote(str(folder / name)) for name in (SPEC, file))
    check = f"train {spec} --dry-run" if source.has_model else f"validate-spec {spec}"
    echo(f"{folder}: {', '.join(files)}\nnext:\n  asyncrl {check}\n  {command} {started}")
    if source.has_model:
        echo(f"`{MODEL}` has random weights: to use your own model, set model.path in {spec} to its folder or hub id")
