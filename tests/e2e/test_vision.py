"""Images on the real stack: a run that is killed and resumed without its image files equals an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from shapes import Shapes

from asyncrl_cli.journal.queries import group_record
from asyncrl_cli.journal.schema import FILE, open_for_reading

from .conftest import Runs, rows
from .faults.disturbed import DisturbedRun
from .faults.verdict import differences, replay_violations
from .journal import probe_gaps

pytestmark = pytest.mark.stack

STEPS, GROUPS = 2, 4
ADMITTED = "SELECT count(*) FROM groups"
REWARD = """
def reward(prompt, response):
    return sum(map(ord, response)) % 97 / 97  # different responses differ, also those of random weights
"""
CAMERA = """
from PIL import Image

from asyncrl_cli.tasks.base import Step


class Camera:
    def __init__(self, prompt):
        self.prompt = prompt
        self.seen = ""

    def reset(self):
        return self.prompt["prompt"]

    def step(self, reply):
        self.seen += reply["content"] + "/"
        shot = Image.new("RGB", (56, 56), (sum(map(ord, self.seen)) % 256, 0, 0))  # each reply has its own picture
        content = [{"type": "image", "image": shot}, {"type": "text", "text": "and now?"}]
        return Step([{"role": "user", "content": content}], shot.getpixel((0, 0))[0] / 256, self.seen.count("/") == 2)
"""


def spec_for(runs: Runs, name: str, pipeline: dict[str, Any], steps: int = STEPS, **sections: Any) -> Path:
    """The template `vision` with one picture for each row, and a reward that random weights earn."""
    folder = runs.folder / name
    assert runs.run("init", "vision", folder).code == 0
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "camera.py").write_text(CAMERA)
    with (folder / "train.jsonl").open("w") as file:
        for row, prompt in enumerate(Shapes().prompts("train", 2 * STEPS * GROUPS)):
            (folder / f"pictures/{row}.png").write_bytes(prompt.images[0].data)
            line = {"uid": str(row), "question": "how many?", "image": f"pictures/{row}.png"}
            file.write(json.dumps(line) + "\n")
    spec = yaml.safe_load((folder / "spec.yaml").read_text())
    spec |= {"name": name, "runs_dir": str(runs.folder), "stop": {"steps": steps}, "tracking": {"mlflow": False}}
    spec |= sections
    spec["model"]["freeze"] = []  # the tower's weights are published, too
    spec["data"]["eval"] = None
    del spec["evaluation"], spec["checkpoints"]
    spec["pipeline"] |= {"groups_per_step": GROUPS, **pipeline}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return folder / "spec.yaml"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> DisturbedRun:
    """A run whose driver is killed, and that is resumed without its picture files."""
    runs = Runs(tmp_path_factory.mktemp("killed"))
    spec = spec_for(runs, "disturbed", {"mode": "async", "max_staleness": 0})
    run = DisturbedRun(runs, spec, STEPS, random.Random(0))
    try:
        run.start()
        # All groups are in the journal, and the last ones are not trained: no picture is needed any more.
        run.until(lambda: (run.ask(ADMITTED) or 0) == STEPS * GROUPS, "the last group's admission")
        assert run.mark and run.trained() < STEPS
        os.kill(run.pid, signal.SIGKILL)
        run.await_cleanup()
        shutil.rmtree(spec.parent / "pictures")
        run.resume()
        run.finish(resumes=1)
    finally:
        run.end()
    assert run.resumes == 1 and not run.stops, run.printed()
    return run


def assert_engines_saw_what_was_trained(run: Path) -> None:
    trained = rows(run, "metrics.jsonl")
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert all(row["engine/logprob_gap_max"] < 1e-4 for row in trained), trained
    assert max(probe_gaps(run).values()) < 1e-4
    assert any(row.get("publish/probe_change", 0.0) > 1e-3 for row in trained), "the weights moved"


def test_killed_image_run_continues_without_its_files_and_replays(killed: DisturbedRun) -> None:
    assert_engines_saw_what_was_trained(killed.folder)
    assert not replay_violations(killed.runs, killed)
    with closing(open_for_reading(killed.folder / FILE)) as journal:
        (images,) = journal.execute("SELECT count(*) FROM images").fetchone()
        prompts = journal.execute("SELECT DISTINCT digest FROM image_places").fetchall()
    assert images == len(prompts) == STEPS * GROUPS

    report = killed.runs.folder / "vision.html"
    killed.runs.succeed("report", killed.folder, "-o", report)
    assert "data:image/png;base64," in report.read_text()


# On a real engine, an aborted image rollout continues with the same tokens: tests/rollout/test_images.py.
@pytest.mark.rotating
def test_killed_image_run_equals_an_undisturbed_one(killed: DisturbedRun, runs: Runs) -> None:
    undisturbed = runs.train_spec(spec_for(runs, "undisturbed", {"mode": "sync", "max_staleness": 0}))
    assert_engines_saw_what_was_trained(undisturbed)
    assert not differences(undisturbed, killed.folder)


@pytest.mark.rotating
def test_environment_shows_pictures_that_are_trained_on_inspected_and_replayed(runs: Runs) -> None:
    spec = spec_for(runs, "camera", {"mode": "async", "max_staleness": 1}, steps=2, task={"use": "camera:Camera"})
    run = runs.train_spec(spec, "model.max_images=2", "model.freeze=[vision]")
    trained = rows(run, "metrics.jsonl")
    assert len(trained) == 2 and trained[0]["engine/logprob_gap_max"] < 1e-4, trained
    with closing(open_for_reading(run / FILE)) as journal:
        group = group_record(journal, 0)
        assert len({one.image.digest for rollout in group.rollouts for one in rollout.images}) > 2
    first = group.rollouts[0]
    assert [one.length for one in first.images] == [4, 4], "the row's picture, and the one after the first reply"
    ended = runs.succeed("inspect", "buffer", run, "--rollout", first.rollout_id, "--json")
    (shown,) = json.loads(ended.out)["rollouts"]
    assert [(one["image"], one["tokens"]) for one in shown["images"]] == [(one.image.digest, 4) for one in first.images]
    runs.succeed("replay", run)
