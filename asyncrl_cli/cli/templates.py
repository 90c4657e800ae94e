"""What `asyncrl init` copies: folders with a spec, the code and data that it names, and a README.

A template is a folder of `templates/` whose README begins with a heading; that heading is what `--list` shows. An
installed wheel carries the folders as `asyncrl_cli/_templates`; an editable install takes them from the repository.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import asyncrl_cli
from asyncrl_cli.core.errors import UserError
from asyncrl_cli.core.suggest import did_you_mean
from asyncrl_cli.spec.schema import FILE, schema_text

SPEC = "spec.yaml"


class TemplateError(UserError):
    """A template that there is not, or a folder that must not be written to."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Template:
    """One folder to copy."""

    folder: Path

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return self.folder.name

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return (self.folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")

    def copy(self, folder: Path, force: bool) -> list[str]:
        """Copy to ``folder``, name the spec's runs after it, and return the names of the files written, among them a
        JSON schema for editors.

        ``force`` writes into a folder that is not empty: files of the same name are replaced, others stay. Raises
        ``TemplateError``.
        """
        try:
            if folder.exists() and not folder.is_dir():
                raise TemplateError("there is a file of this name", location=str(folder), hint="name a folder")
            if not force and folder.is_dir() and any(folder.iterdir()):
                hint = "name another, or use --force, which replaces files of the same name"
                raise TemplateError("the folder is not empty", location=str(folder), hint=hint)
            shutil.copytree(self.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            spec = folder / SPEC
            text = re.sub(r"(\$schema=).*", rf"\g<1>{FILE}", spec.read_text(encoding="utf-8"), count=1)
            spec.write_text(_renamed(text, folder.resolve().name), encoding="utf-8")
            (folder / FILE).write_text(schema_text(), encoding="utf-8")
        except OSError as error:  # copytree collects its own, which are one too
            raise TemplateError(f"it cannot be written: {error}", location=str(folder)) from error
        return sorted([FILE, *(path.name for path in self.folder.iterdir() if path.name != "__pycache__")])


def _renamed(spec: str, folder: str) -> str:
    """The spec's text with ``name`` made from the folder's, as far as a run's name may have its characters."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:64]
    return re.sub(r"^name: .*$", f'name: "{name}"', spec, count=1, flags=re.MULTILINE) if name else spec


def templates() -> list[Template]:
    """All templates, by name."""
    package = Path(asyncrl_cli.__file__).parent
    places = (package / "_templates", package.parent / "templates")
    folder = next(place for place in places if place.is_dir())
    return [Template(path) for path in sorted(folder.iterdir()) if (path / SPEC).is_file()]


def find(name: str) -> Template:
    """The template of this name. Raises ``TemplateError`` with the one that was probably meant."""
    known = {template.name: template for template in templates()}
    if name in known:
        return known[name]
    hint = did_you_mean(name, known, f"templates: {', '.join(known)}")
    raise TemplateError(f"there is no template {name!r}", hint=hint)
