"""`asyncrl init`: every template is copied completely, under its new name, and its spec is valid without changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_cli.cli.init import Template, templates
from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.sandbox.trial import missing_program
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.schema import FILE, json_schema

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEMPLATES = templates()
NAMES = sorted(path.parent.name for path in (ROOT / "templates").glob("*/spec.yaml"))


@pytest.fixture(autouse=True)
def judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the template `judge` refers to."""
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("JUDGE_API_KEY", "none")


def names_in(folder: Path) -> list[str]:
    """Paths of all files in a template."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(file) for file in files if "__pycache__" not in file.parts)


def test_the_list_has_every_template_with_its_title(asyncrl) -> None:  # type: ignore[no-untyped-def]
    code, out, err = asyncrl("init", "--list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == NAMES
    assert out.splitlines() == [f"{template.name:16}  {template.title}" for template in TEMPLATES]
    assert all(template.title for template in TEMPLATES)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_template_is_copied_named_and_valid(asyncrl, template: Template, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = asyncrl("init", template.name, "new/my task")
    assert (code, err) == (0, "")
    starts = {"slurm": "sbatch 'new/my task/job.sbatch'", "kuberay": "kubectl apply -f 'new/my task/rayjob.yaml'"}
    start = starts.get(template.name, "asyncrl train 'new/my task/spec.yaml'")
    first = "train 'new/my task/spec.yaml' --dry-run" if template.has_model else "validate-spec 'new/my task/spec.yaml'"
    assert out.splitlines()[1:4] == ["next:", f"  asyncrl {first}", f"  {start}"]
    assert [("model.path" in line) for line in out.splitlines()[4:]] == [True] * template.has_model
    folder = tmp_path / "new/my task"
    made = ["model/model.safetensors"] if template.has_model else []
    assert names_in(folder) == sorted([*names_in(template.folder), FILE, *made])
    assert (folder / "spec.yaml").read_text().startswith(f"# yaml-language-server: $schema={FILE}\n")
    assert json.loads((folder / FILE).read_text()) == json_schema()
    for file in names_in(template.folder):
        if file != "spec.yaml":
            assert (folder / file).read_bytes() == (template.folder / file).read_bytes()
    code, out, err = asyncrl("validate-spec", "new/my task/spec.yaml")
    assert code == 0 and "is valid: my-task runs" in out
    spec = load_spec("new/my task/spec.yaml").spec
    if spec.task.sandbox is not None and (reason := missing_program(spec.task.sandbox)):
        assert err.startswith(f"warning: task.sandbox: this machine cannot start the sandbox: {reason}\n")
        return
    assert err == "", "no warning"
    if template.name == "openenv":  # it needs a server
        with pytest.raises(TaskError, match="no OpenEnv server answers"):
            Experiment.load(spec, folder)
        return
    assert Experiment.load(spec, folder).spec == spec, "the task is there, and its data"


def test_a_saved_models_first_prompt_is_shown(asyncrl) -> None:  # type: ignore[no-untyped-def]
    assert asyncrl("init", "saved-model", "mine")[0] == 0
    code, out, err = asyncrl("validate-spec", "mine/spec.yaml", "--prompt")
    assert (code, err) == (0, "") and "mine runs" in out
    assert "<|im_end|>\\n<|im_start|>assistant\\n" in out.replace("\n" + " " * 23, "")
    code, out, _ = asyncrl(
        *("validate-spec", "mine/spec.yaml", "--prompt", "--json"),
        *("--set", "model.chat_template_kwargs={enable_thinkin: false}"),
    )
    failed = [finding for finding in json.loads(out)["findings"] if finding["status"] == "failure"]
    assert code == 2 and [finding["check"] for finding in failed] == ["chat template"]
    assert failed[0]["hint"] == "did you mean `enable_thinking`?"
    assert asyncrl("validate-spec", "mine/spec.yaml", "mine/spec.yaml", "--prompt")[0] == 2


def test_a_folder_in_use_is_unchanged_unless_forced(asyncrl, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "mine"
    folder.mkdir()
    assert asyncrl("init", "agent", "mine")[0] == 0, "an empty folder is free"
    (folder / "spec.yaml").write_text("mine")
    (folder / "notes").write_text("mine")
    hint = "name another one, or use --force, which replaces files with the same name"
    refused = f"error: the folder is not empty\n --> mine\nhint: {hint}\n"
    assert asyncrl("init", "agent", "mine") == (2, "", refused)
    assert (folder / "spec.yaml").read_text() == "mine"
    assert asyncrl("init", "agent", "mine", "--force")[0] == 0
    assert load_spec(folder / "spec.yaml").spec.name == "mine"
    assert (folder / "notes").read_text() == "mine"


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("agnet", "x"), "no template is called 'agnet'\nhint: did you mean `agent`?"),
        (("zzz", "x"), f"no template is called 'zzz'\nhint: templates: {', '.join(NAMES)}"),
        (("../maths", "x"), "no template is called '../maths'\nhint: did you mean `math`?"),
        (("agent", "file"), "a file with this name exists\n --> file\nhint: name a folder"),
        (("agent", LONG), f"the folder cannot be written: [Errno 36] File name too long: '{LONG}'\n --> {LONG}"),
        (("agent", "file/x"), "the folder cannot be written: [Errno 20] Not a directory: 'file/x'\n --> file/x"),
    ],
)
def test_impossible_requests_are_refused(asyncrl, arguments: tuple[str, ...], shown: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    assert asyncrl("init", *arguments) == (2, "", f"error: {shown}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("arguments", [(), ("agent",)])
def test_missing_arguments_are_named(asyncrl, arguments: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    code, out, err = asyncrl("init", *arguments)
    assert (code, out) == (2, "")
    assert "name a folder: asyncrl init agent my-task" in err if arguments else "use --list" in err


@pytest.mark.parametrize(
    ("folder", "name"), [("123", "123"), ("true", "true"), (".hidden", "hidden"), ("été", "t"), ("§", None)]
)
def test_odd_folders_give_names_that_a_run_may_have(asyncrl, folder: str, name: str | None) -> None:  # type: ignore[no-untyped-def]
    assert asyncrl("init", "agent", folder)[0] == 0
    assert load_spec(Path(folder) / "spec.yaml").spec.name == (name or "my-agent")
