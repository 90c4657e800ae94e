"""The journal stores each image once, reads it back at its place, requeues and prunes it, and notices damage."""

from __future__ import annotations

import pickle
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from buffer_stand_ins import (
    PROMPT_IDS,
    SETTINGS,
    batch_in,
    candidates,
    commit,
    finish,
    opened,
    prune,
    publish_record,
    rollout,
    rows_in,
)

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.rollout_rows import read_group
from asyncrl_cli.journal.schema import JournalError, open_for_reading
from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.groups import Candidate, Outcome
from asyncrl_cli.records.images import Image, PlacedImage
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import Scored

CAT, DOG, SCREEN = (Image.from_bytes(data) for data in (b"cat" * 1000, b"dog" * 1000, b"screen" * 1000))


def pictured(candidate: Candidate, *images: Image, episode: bool = False) -> Candidate:
    parts = [{"type": "image", "image": image.digest} for image in images]
    prompt = Prompt(candidate.prompt.uid, ({"role": "user", "content": parts},), {}, images)
    if episode:
        return replace(candidate, prompt=prompt, prompt_ids=())
    places = tuple(PlacedImage(image, number, 1) for number, image in enumerate(images))
    return replace(candidate, prompt=prompt, images=places)


def train(book: DurableLedger, serial: int, *images: Image) -> None:
    """Train a step with two groups that have these images."""
    for group in book.admit([pictured(one, *images) for one in candidates(serial, 2)]):
        finish(book, group.group_id)
    assert book.take(book.ledger.step) is None
    book.publish(publish_record(book.ledger.step, book.ledger.step))
    commit(book)


def test_a_batch_has_its_images_in_place_and_each_is_stored_and_pickled_once(path: Path) -> None:
    book = opened(path)
    train(book, 1, CAT, DOG)
    batch = batch_in(path, 0)
    wanted = (PlacedImage(CAT, 0, 1), PlacedImage(DOG, 1, 1))
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    assert [rollout.images for rollout in rollouts] == [wanted] * 4
    assert rows_in(path, "images") == 2
    assert pickle.dumps(batch).count(CAT.data) == 1


def test_running_groups_and_prompts_have_their_images_after_a_restart(path: Path) -> None:
    book = opened(path)
    book.admit([pictured(candidates(1, 1)[0], CAT), pictured(candidates(2, 1)[0], DOG, episode=True)])
    commit(book)
    kept = book.fallback(0)
    book.journal.close()
    single, episode = DurableLedger(path, SETTINGS).opening().groups
    assert single.images == (PlacedImage(CAT, 0, 1),) and single.prompt.images == (CAT,)
    assert episode.images == () and episode.prompt.images == (DOG,)
    path.unlink()
    other = DurableLedger(path, SETTINGS, {"step": 0, **kept})
    assert [prompt.images for prompt in other.opening().waiting] == [(CAT,), (DOG,)]


def test_images_of_later_turns_and_branches_are_recorded_with_the_rollout(path: Path) -> None:
    book = opened(path)
    groups = book.admit([pictured(one, DOG, episode=True) for one in candidates(1, 2)])

    def played(name: str, *places: PlacedImage, branches: tuple[Rollout, ...] = ()) -> Rollout:
        return replace(rollout(name, (0,) * 8), prompt_ids=(), images=places, branches=branches)

    early, late = PlacedImage(DOG, 0, 2), PlacedImage(SCREEN, 4, 3)
    ids = [f"{group.group_id}-{index}" for group in groups for index in range(2)]
    rollouts = [played(name, early, late, branches=(played(f"{name}.1", late),)) for name in ids]
    book.record(rollouts, [Outcome(name, Scored(float(name[-1]))) for name in ids])
    assert book.take(0) is None
    commit(book)
    for group in batch_in(path, 0).groups:
        for found in group.rollouts:
            assert found.images == (early, late)
            assert found.branches[0].images == (late,)
    assert rows_in(path, "images") == 2


def test_a_requeued_prompt_keeps_its_images(path: Path) -> None:
    book = opened(path)
    (first,) = book.admit([pictured(one, CAT) for one in candidates(1, 1)])
    entry = book.ledger.admit()
    book.journal.requeued(first.group_id, entry)
    commit(book)
    with closing(open_for_reading(path)) as connection:
        again = read_group(connection, entry.group_id)
    assert again.images == (PlacedImage(CAT, 0, 1),) and again.prompt.images == (CAT,)


def test_pruning_deletes_images_that_no_kept_group_needs(path: Path) -> None:
    book = opened(path)
    train(book, 1, CAT, DOG)
    train(book, 3, DOG)
    prune(book, 1)
    assert rows_in(path, "images") == 1
    with closing(open_for_reading(path)) as connection:
        pruned = read_group(connection, 0)
    assert pruned.prompt.images == () and pruned.prompt_ids == PROMPT_IDS
    assert [rollout.images for rollout in batch_in(path, 1).groups[0].rollouts] == [(PlacedImage(DOG, 0, 1),)] * 2
    with pytest.raises(LookupError, match="pruned"):
        batch_in(path, 0)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE images SET data = X'00'",
        "DELETE FROM images",
        "DELETE FROM image_places",
        "UPDATE image_places SET start = start + 1",
        "UPDATE image_places SET digest = 'other'",
    ],
)
def test_damaged_images_are_noticed(path: Path, damage: str) -> None:
    book = opened(path)
    train(book, 1, CAT)
    book.journal.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage)
    with pytest.raises((sqlite3.DatabaseError, JournalError), match="image"):
        batch_in(path, 0)
