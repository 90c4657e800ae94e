"""The journal's tables, and how its file is opened. docs/journal.md describes every column.

- Large values have tables of their own (``segments``, ``experts``, ``images``), or scans of ``rollouts`` would go
  through gigabytes.
- Arrays are raw little-endian bytes with one dimension: ``tokens`` and ``prompt_ids`` int32, ``logprobs`` float32 in
  nats.
- SQLite does not notice a flipped bit in a value, so rows carry CRC-32 checksums (journal/rollout_rows.py). A segment's
  ``crc`` covers its ``tokens`` and then its ``logprobs``, and its ``key_crc`` also covers the row's key. A group's
  ``crc`` covers its prompt; a rollout's ``crc`` covers its reward and how it ended. A checksum of NULL, in rows written
  by hand, is not compared.
- Version -1 of a segment marks context, which was not sampled. ``start`` -1 in ``experts`` and ``rollout_index`` -1 in
  ``image_places`` mark the prompt. Times are unix seconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from asyncrl_cli.core.errors import UserError

FILE = "journal.db"
"""The journal's file name in a run's folder."""
LOCK_PATIENCE_S = 20.0
"""Seconds that a writer waits for another program's lock on the file."""

CHECKED_BYTES = 2**32
"""Journals up to this size are checked completely before a run continues with them."""

SCHEMA = 3
"""The schema's number, stored in the file as ``PRAGMA user_version``."""

TABLES = """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    INSERT INTO meta VALUES ('pruned_to', '0');
    CREATE TABLE starts (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL,
        step INTEGER NOT NULL, version INTEGER NOT NULL, note TEXT NOT NULL, settings TEXT NOT NULL
    );
    CREATE TABLE groups (
        id INTEGER PRIMARY KEY, uid TEXT NOT NULL, prompt TEXT NOT NULL, fields TEXT NOT NULL,
        prompt_ids BLOB NOT NULL, version INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'taken', 'rejected', 'requeued')),
        reason TEXT NOT NULL DEFAULT '', step INTEGER, serial INTEGER, epoch INTEGER, position INTEGER,
        admitted_at REAL NOT NULL, ended_at REAL, crc INTEGER
    );
    CREATE INDEX groups_outstanding ON groups (state) WHERE state IN ('running', 'finished');
    CREATE INDEX groups_dropped ON groups (state, reason) WHERE state IN ('rejected', 'requeued');
    CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;
    CREATE INDEX groups_by_uid ON groups (uid);
    CREATE TABLE rollouts (
        group_id INTEGER NOT NULL, rollout_index INTEGER NOT NULL, tokens INTEGER NOT NULL, finish_reason TEXT,
        reward REAL, failure TEXT, oldest INTEGER, newest INTEGER, recorded_at REAL NOT NULL, metrics TEXT,
        scored_at REAL, masked INTEGER NOT NULL DEFAULT 0, turns TEXT, crc INTEGER,
        PRIMARY KEY (group_id, rollout_index)
    ) WITHOUT ROWID;
    CREATE TABLE segments (
        group_id INTEGER NOT NULL, rollout_index INTEGER NOT NULL, branch INTEGER NOT NULL, start INTEGER NOT NULL,
        version INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, crc INTEGER NOT NULL,
        at REAL NOT NULL DEFAULT 0, key_crc INTEGER,
        PRIMARY KEY (group_id, rollout_index, branch, start)
    );
    -- Counts tokens by version without reading them: `asyncrl staleness` would go through gigabytes.
    CREATE INDEX segments_sizes ON segments (group_id, version, length(tokens));
    -- Not in segments: experts outweigh the tokens by far.
    CREATE TABLE experts (
        group_id INTEGER NOT NULL, rollout_index INTEGER NOT NULL, branch INTEGER NOT NULL, start INTEGER NOT NULL,
        ids BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (group_id, rollout_index, branch, start)
    );
    CREATE TABLE images (digest TEXT PRIMARY KEY, data BLOB NOT NULL);
    CREATE TABLE image_places (
        group_id INTEGER NOT NULL, rollout_index INTEGER NOT NULL, branch INTEGER NOT NULL, number INTEGER NOT NULL,
        start INTEGER NOT NULL, length INTEGER NOT NULL, digest TEXT NOT NULL, crc INTEGER NOT NULL,
        PRIMARY KEY (group_id, rollout_index, branch, number)
    ) WITHOUT ROWID;
    CREATE INDEX image_places_by_digest ON image_places (digest);
    CREATE TABLE engine_requests (
        ended_at REAL NOT NULL, request TEXT NOT NULL, begun_at REAL NOT NULL, engine TEXT NOT NULL,
        ending TEXT NOT NULL, tokens INTEGER NOT NULL DEFAULT 0, context_tokens INTEGER NOT NULL DEFAULT 0,
        cached_tokens INTEGER, running_from REAL, running_until REAL,
        PRIMARY KEY (ended_at, request)
    ) WITHOUT ROWID;
    CREATE TABLE engine_changes (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, engine TEXT NOT NULL,
        change TEXT NOT NULL CHECK (change IN ('join', 'leave')), reason TEXT NOT NULL
    );
    CREATE TABLE batches (
        step INTEGER PRIMARY KEY, version INTEGER NOT NULL, late INTEGER NOT NULL, taken_at REAL NOT NULL,
        trained_at REAL, digest TEXT, metrics TEXT
    );
    CREATE TABLE publishes (
        version INTEGER PRIMARY KEY, step INTEGER NOT NULL, at REAL NOT NULL, checksum TEXT NOT NULL,
        seconds REAL NOT NULL, stall_s REAL NOT NULL, gap REAL NOT NULL, change REAL NOT NULL,
        write_s REAL NOT NULL DEFAULT 0, transfer_s REAL NOT NULL DEFAULT 0, waited_s REAL NOT NULL DEFAULT 0,
        pauses TEXT NOT NULL DEFAULT '{}'
    );
    CREATE TABLE checkpoints (
        step INTEGER PRIMARY KEY, at REAL NOT NULL, folder TEXT NOT NULL, seconds REAL NOT NULL,
        stall_s REAL NOT NULL, removed_at REAL, uploaded_at REAL, upload_failure TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE evaluations (
        step INTEGER NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL, accuracy REAL NOT NULL, mean_reward REAL NOT NULL,
        mean_length REAL NOT NULL, prompts INTEGER NOT NULL, oldest INTEGER NOT NULL, newest INTEGER NOT NULL,
        PRIMARY KEY (step, kind)
    ) WITHOUT ROWID;
    CREATE TABLE failures (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, part TEXT NOT NULL, message TEXT NOT NULL
    );
"""


DAMAGED = (
    "the file is damaged: `asyncrl resume RUN --without-journal` continues from the newest checkpoint, and generates "
    "untrained groups again; the damaged file is kept"
)


_SIGNS_OF_DAMAGE = ("malformed", "not a database", "corrupt", "decode")


class JournalError(UserError):
    """The journal cannot be written or read. It still has everything acknowledged before."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a ``JournalError`` with a hint."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        text = str(error)
        if "full" in text or (isinstance(error, sqlite3.OperationalError) and "I/O" in text):
            hint = "free space on its disk, then `asyncrl resume`: everything acknowledged is in it"
        elif "locked" in text or "busy" in text:
            hint = "another program holds its lock: close it, then `asyncrl resume`"
        elif any(sign in text for sign in _SIGNS_OF_DAMAGE):
            hint = DAMAGED
        else:
            hint = "check the permissions of the file and its folder"
        raise JournalError(f"the journal failed: {text}", location=str(path), hint=hint) from error


@contextmanager
def sound(path: Path, *further_errors: type[Exception]) -> Iterator[None]:
    """Turn the errors that inconsistent values cause (``ValueError``, ``KeyError`` and ``further_errors``) into a
    ``JournalError``: SQLite does not check the values that it returns."""
    inconsistent: tuple[type[Exception], ...] = (ValueError, KeyError, *further_errors)
    try:
        yield
    except inconsistent as error:
        raise JournalError(f"the journal is inconsistent: {error}", location=str(path), hint=DAMAGED) from error


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Connect as the only writer; creates the tables in an empty file. Raises ``JournalError``."""
    with explained(path), sound(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=LOCK_PATIENCE_S)
        has_tables = _has_schema(connection, path)  # first: a journal with another schema must not be changed
        connection.execute("PRAGMA page_size = 16384")
        # WAL and FULL together: readers never block the writer, and a commit returns only when its bytes are on disk.
        # With NORMAL, a power failure would lose acknowledged commits.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -65536")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        if not has_tables:  # in one transaction: a reader must not see only some of the tables
            connection.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Connect for reading only, to a live run's journal, a dead run's or a copy. Raises ``JournalError``."""
    if not path.is_file():
        raise JournalError(
            "there is no journal",
            location=str(path),
            hint="a run has one from its first group on; if this run has trained, restore the file from a copy",
        )
    with explained(path):
        connection = _connected_for_reading(path)
        if not _has_schema(connection, path):
            raise JournalError(
                "this is not a journal of asyncrl", location=str(path), hint="restore the run's own file from a copy"
            )
    return connection


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Connect for reading only, during the block. Raises ``JournalError``, also for damage that the block finds."""
    with closing(open_for_reading(path)) as connection, explained(path):
        yield connection


def is_begun(path: Path) -> bool:
    """True if the journal has tables; a run may have died before it made them. Raises ``JournalError``."""
    with explained(path), closing(_connected_for_reading(path)) as connection:
        return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _connected_for_reading(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_PATIENCE_S)
    try:
        connection.execute("PRAGMA user_version")
        return connection
    except sqlite3.OperationalError as error:
        # Readers share an index file, and a folder without write permission has no room for it.
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    connection.close()
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:  # SQLite ignores this file if it opens the journal as immutable
        raise JournalError(
            f"the journal has commits in {log.name}, which cannot be read in a read-only folder",
            location=str(path),
            hint="copy the folder to a writable place, and inspect the copy",
        )
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


def check(path: Path) -> None:
    """Check all pages of a journal, unless it is very large. Raises ``JournalError`` if it is damaged."""
    with reading(path) as connection:
        if path.stat().st_size <= CHECKED_BYTES:
            (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if result != "ok":
                raise sqlite3.DatabaseError(f"malformed: {result}")


def _has_schema(connection: sqlite3.Connection, path: Path) -> bool:
    """False for an empty file. Raises ``JournalError`` for a journal with another schema."""
    (schema_number,) = connection.execute("PRAGMA user_version").fetchone()
    if schema_number not in (0, SCHEMA):
        raise JournalError(
            f"the journal has schema {schema_number}, and this asyncrl reads only schema {SCHEMA}",
            location=str(path),
            hint="use the asyncrl that wrote it; manifest.json next to it has the version",
        )
    return bool(schema_number)
