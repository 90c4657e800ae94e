"""The journal's tables, and how its file is opened.

    groups       one row per admitted group: its prompt with its serial number and the position of the data loader after
                 it (NULL for a prompt that runs again), what became of it
    rollouts     one row per rollout of which anything is recorded; no large values, so that scans stay fast
    segments     tokens and log-probs of a rollout's sequences (branch 0, 1, ...), split where the weight
                 version changes; version -1 is for context, which was not sampled
    experts      the experts that an engine chose for the tokens of a segment, where they are recorded: the row has the
                 segment's key; with ``start`` -1 those of the rollout's prompt (records/experts.py has the format)
    engine_changes   one row for each time that an engine began to serve (``join``) or left (``leave``)
    engine_requests  one row per request that an engine had; ``request`` is GROUP-INDEX, of an episode's call
                 GROUP-INDEX/CALL, and eval:... of an evaluation's
    batches      one row per step taken; its groups are those with ``groups.step = batches.step``
    publishes    one row per weight version, with the checksum of the published bytes
    checkpoints, evaluations, failures, starts    the rest of the run's history
    meta         what the rows mean: bounds, group size, where the history begins

Arrays are raw little-endian bytes of one dimension: ``tokens`` and ``prompt_ids`` int32, ``logprobs`` float32 (nats).
SQLite itself notices no flipped bit in a value, so rows carry CRC-32 checksums (journal/rollout_rows.py): ``crc`` of a
segment is that of its ``tokens`` and then ``logprobs``, ``key_crc`` also covers which tokens they are; ``crc`` of a
group covers its prompt, and ``crc`` of a rollout its reward and how it ended. Rows of older schemas have NULL there.
Times are unix seconds. Writers use ``PRAGMA user_version`` as the schema's number; ``MIGRATIONS[n]`` leads from
number n to n + 1.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from asyncrl_cli.core.errors import UserError

FILE = "journal.db"
"""The journal's name in a run's folder."""
LOCK_PATIENCE_S = 20.0
"""Seconds that a writer waits for another program's lock on the file."""

CHECKED_BYTES = 2**32
"""Journals up to this size are checked completely before a run continues with them."""

MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE starts (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL,
        step INTEGER NOT NULL, version INTEGER NOT NULL, note TEXT NOT NULL
    );
    CREATE TABLE groups (
        id INTEGER PRIMARY KEY, uid TEXT NOT NULL, prompt TEXT NOT NULL, fields TEXT NOT NULL,
        prompt_ids BLOB NOT NULL, version INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'taken', 'rejected', 'requeued')),
        reason TEXT NOT NULL DEFAULT '', step INTEGER, serial INTEGER, epoch INTEGER, position INTEGER,
        admitted_at REAL NOT NULL, ended_at REAL
    );
    CREATE INDEX groups_outstanding ON groups (state) WHERE state IN ('running', 'finished');
    CREATE INDEX groups_dropped ON groups (state, reason) WHERE state IN ('rejected', 'requeued');
    CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;
    CREATE INDEX groups_by_uid ON groups (uid);
    CREATE TABLE rollouts (
        group_id INTEGER NOT NULL, place INTEGER NOT NULL, tokens INTEGER NOT NULL, finish_reason TEXT,
        reward REAL, failure TEXT, oldest INTEGER, newest INTEGER, recorded_at REAL NOT NULL,
        PRIMARY KEY (group_id, place)
    ) WITHOUT ROWID;
    CREATE TABLE segments (
        group_id INTEGER NOT NULL, place INTEGER NOT NULL, start INTEGER NOT NULL, version INTEGER NOT NULL,
        tokens BLOB NOT NULL, logprobs BLOB NOT NULL, crc INTEGER NOT NULL,
        PRIMARY KEY (group_id, place, start)
    );
    -- Counts tokens by version without reading them: `asyncrl staleness` would go through gigabytes.
    CREATE INDEX segments_sizes ON segments (group_id, version, length(tokens));
    CREATE TABLE batches (
        step INTEGER PRIMARY KEY, version INTEGER NOT NULL, late INTEGER NOT NULL, taken_at REAL NOT NULL,
        trained_at REAL, digest TEXT, metrics TEXT
    );
    CREATE TABLE publishes (
        version INTEGER PRIMARY KEY, step INTEGER NOT NULL, at REAL NOT NULL, checksum TEXT NOT NULL,
        seconds REAL NOT NULL, stall_s REAL NOT NULL, gap REAL NOT NULL, change REAL NOT NULL
    );
    CREATE TABLE checkpoints (
        step INTEGER PRIMARY KEY, at REAL NOT NULL, folder TEXT NOT NULL, seconds REAL NOT NULL, removed_at REAL
    );
    CREATE TABLE evaluations (
        step INTEGER NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL, accuracy REAL NOT NULL, mean_reward REAL NOT NULL,
        mean_length REAL NOT NULL, prompts INTEGER NOT NULL, oldest INTEGER NOT NULL, newest INTEGER NOT NULL,
        PRIMARY KEY (step, kind)
    ) WITHOUT ROWID;
    CREATE TABLE failures (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, part TEXT NOT NULL, message TEXT NOT NULL
    );
    """,
    # Rollouts of several sequences, and what tasks measure beside the reward.
    """
    CREATE TABLE branched (
        group_id INTEGER NOT NULL, place INTEGER NOT NULL, branch INTEGER NOT NULL DEFAULT 0, start INTEGER NOT NULL,
        version INTEGER NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, crc INTEGER NOT NULL,
        PRIMARY KEY (group_id, place, branch, start)
    );
    INSERT INTO branched (group_id, place, start, version, tokens, logprobs, crc)
        SELECT group_id, place, start, version, tokens, logprobs, crc FROM segments;
    DROP TABLE segments;
    ALTER TABLE branched RENAME TO segments;
    -- Counts tokens by version without reading them: `asyncrl staleness` would go through gigabytes.
    CREATE INDEX segments_sizes ON segments (group_id, version, length(tokens));
    ALTER TABLE rollouts ADD COLUMN metrics TEXT;
    """,
    # When tokens were recorded and rewards known, and which engine had a request when.
    """
    ALTER TABLE segments ADD COLUMN at REAL;
    ALTER TABLE rollouts ADD COLUMN judged_at REAL;
    CREATE TABLE spells (
        ended_at REAL NOT NULL, request TEXT NOT NULL, begun_at REAL NOT NULL, engine TEXT NOT NULL,
        ending TEXT NOT NULL, PRIMARY KEY (ended_at, request)
    ) WITHOUT ROWID;
    """,
    # Checksums of more than tokens, the settings that each start worked by, and which groups' tokens were dropped:
    # those of groups below meta's `pruned_to`.
    """
    ALTER TABLE groups ADD COLUMN crc INTEGER;
    ALTER TABLE rollouts ADD COLUMN crc INTEGER;
    ALTER TABLE segments ADD COLUMN key_crc INTEGER;
    ALTER TABLE starts ADD COLUMN settings TEXT;
    UPDATE starts SET settings = (SELECT value FROM meta WHERE key = 'settings');
    INSERT INTO meta SELECT 'pruned_to',
        coalesce((SELECT min(group_id) FROM segments), (SELECT max(id) + 1 FROM groups), 0);
    """,
    # Other names for the same values; ``AS_NEWEST`` has them, too.
    """
    ALTER TABLE rollouts RENAME COLUMN place TO rollout_index;
    ALTER TABLE rollouts RENAME COLUMN judged_at TO scored_at;
    ALTER TABLE segments RENAME COLUMN place TO rollout_index;
    ALTER TABLE spells RENAME TO engine_requests;
    """,
    # Engines come and go while a run continues.
    """
    CREATE TABLE engine_changes (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, engine TEXT NOT NULL,
        change TEXT NOT NULL CHECK (change IN ('join', 'leave')), reason TEXT NOT NULL
    );
    """,
    # The choice of experts; apart from the tokens, which it outweighs by far.
    """
    CREATE TABLE experts (
        group_id INTEGER NOT NULL, rollout_index INTEGER NOT NULL, branch INTEGER NOT NULL, start INTEGER NOT NULL,
        ids BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (group_id, rollout_index, branch, start)
    );
    """,
    # The work of an engine on a request, and what a publish kept waiting.
    """
    ALTER TABLE engine_requests ADD COLUMN tokens INTEGER;
    ALTER TABLE engine_requests ADD COLUMN context_tokens INTEGER;
    ALTER TABLE engine_requests ADD COLUMN cached_tokens INTEGER;
    ALTER TABLE engine_requests ADD COLUMN running_from REAL;
    ALTER TABLE engine_requests ADD COLUMN running_until REAL;
    ALTER TABLE engine_requests ADD COLUMN first_token_s REAL;
    ALTER TABLE publishes ADD COLUMN write_s REAL;
    ALTER TABLE publishes ADD COLUMN transfer_s REAL;
    ALTER TABLE publishes ADD COLUMN waited_s REAL;
    ALTER TABLE publishes ADD COLUMN pauses TEXT;
    """,
)

_NO_WORK = (
    "NULL AS tokens, NULL AS context_tokens, NULL AS cached_tokens, NULL AS running_from, NULL AS running_until, "
    "NULL AS first_token_s"
)

_NO_WAITS = """
    CREATE TEMP VIEW publishes AS
        SELECT *, NULL AS write_s, NULL AS transfer_s, NULL AS waited_s, NULL AS pauses FROM main.publishes;
    """

_WITHOUT_WORK = f"""
    CREATE TEMP VIEW engine_requests AS SELECT *, {_NO_WORK} FROM main.engine_requests;
    {_NO_WAITS}
    """

_NO_EXPERTS = """
    CREATE TEMP VIEW experts AS
        SELECT 0 AS group_id, 0 AS rollout_index, 0 AS branch, 0 AS start, NULL AS ids, 0 AS crc WHERE 0;
    """

_NO_ENGINE_CHANGES = """
    CREATE TEMP VIEW engine_changes AS SELECT 0 AS id, 0.0 AS at, '' AS engine, '' AS change, '' AS reason WHERE 0;
    """

AS_NEWEST = {
    4: _NO_ENGINE_CHANGES
    + _NO_EXPERTS
    + _NO_WAITS
    + f"""
    CREATE TEMP VIEW rollouts AS SELECT *, place AS rollout_index, judged_at AS scored_at FROM main.rollouts;
    CREATE TEMP VIEW segments AS SELECT *, place AS rollout_index FROM main.segments;
    CREATE TEMP VIEW engine_requests AS SELECT *, {_NO_WORK} FROM main.spells;
    """,
    5: _NO_ENGINE_CHANGES + _NO_EXPERTS + _WITHOUT_WORK,
    6: _NO_EXPERTS + _WITHOUT_WORK,
    7: _WITHOUT_WORK,
}
"""Views that make a journal of an older schema look like one of the newest, by the older schema's number. Others are
read as a copy that is migrated."""


DAMAGED = (
    "the file is damaged: `asyncrl resume RUN --without-journal` continues from the newest checkpoint, and generates "
    "again what was not trained by then; the damaged file is kept"
)


_SIGNS_OF_DAMAGE = ("malformed", "not a database", "corrupt", "decode")


class JournalError(UserError):
    """The journal cannot be written or read. What was acknowledged before is still in it."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what SQLite raises into a ``JournalError`` with a hint."""
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
            hint = "check the file, its permissions and those of its folder"
        raise JournalError(f"the journal failed: {text}", location=str(path), hint=hint) from error


@contextmanager
def sound(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Turn what inconsistent values raise (``ValueError``, ``KeyError`` and ``more``) into a ``JournalError``: SQLite
    does not check the values it gives back."""
    inconsistent: tuple[type[Exception], ...] = (ValueError, KeyError, *more)
    try:
        yield
    except inconsistent as error:
        raise JournalError(f"the journal is inconsistent: {error}", location=str(path), hint=DAMAGED) from error


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The one writer's connection, with the newest schema. Raises ``JournalError``.

    A commit returns when its bytes are on disk (WAL, ``synchronous=FULL``).
    """
    with explained(path), sound(path):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=LOCK_PATIENCE_S)
        connection.execute("PRAGMA page_size = 16384")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -65536")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        _migrate(connection, path)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, for a live run, a dead one or a copy. Raises ``JournalError``."""
    if not path.is_file():
        raise JournalError(
            "there is no journal",
            location=str(path),
            hint="a run has one from its first group on; if this run has trained, restore the file from a copy",
        )
    with explained(path):
        connection = _connected_for_reading(path)
        number = connection.execute("PRAGMA user_version").fetchone()[0]
        _check_number(number, path)
        if not number:
            raise JournalError(
                "this is not a journal of asyncrl", location=str(path), hint="restore the run's own file from a copy"
            )
        if number == len(MIGRATIONS):
            return connection
        if number in AS_NEWEST:
            connection.executescript(AS_NEWEST[number])
            return connection
        return _up_to_date_copy(connection, path)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write, closed after the block. Raises ``JournalError``, also for damage that the block
    finds."""
    with closing(open_for_reading(path)) as connection, explained(path):
        yield connection


def is_begun(path: Path) -> bool:
    """Whether anything is in a journal; not so when a run died while it made the file. Raises ``JournalError``."""
    with explained(path), closing(_connected_for_reading(path)) as connection:
        return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _up_to_date_copy(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """A journal of an older schema as a temporary copy with the newest one; the file stays as it is. SQLite keeps the
    copy in memory, and on disk what has no room there."""
    copy = sqlite3.connect("")
    with closing(connection):
        connection.backup(copy)
    _migrate(copy, path)
    copy.execute("PRAGMA query_only = ON")
    return copy


def _connected_for_reading(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_PATIENCE_S)
    try:
        connection.execute("PRAGMA user_version")
        return connection
    except sqlite3.OperationalError as error:
        # A folder that may not be written has no room for the index that readers share.
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    connection.close()
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:  # an immutable file is read without it
        raise JournalError(
            f"the journal has commits in {log.name}, which cannot be read in a folder that may not be written",
            location=str(path),
            hint="copy the folder to where you may write, and look at the copy",
        )
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


def check(path: Path) -> None:
    """Read a journal through, unless it is very large. Raises ``JournalError`` when it is damaged."""
    with reading(path) as connection:
        if path.stat().st_size <= CHECKED_BYTES:
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(f"malformed: {found}")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    number = connection.execute("PRAGMA user_version").fetchone()[0]
    _check_number(number, path)
    if number < len(MIGRATIONS):  # in one transaction: no reader may see a schema in between
        scripts = "".join(MIGRATIONS[number:])
        connection.executescript(f"BEGIN IMMEDIATE; {scripts} PRAGMA user_version = {len(MIGRATIONS)}; COMMIT;")


def _check_number(number: int, path: Path) -> None:
    if number > len(MIGRATIONS):
        raise JournalError(
            f"the journal has schema {number}, newer than this version's {len(MIGRATIONS)}",
            location=str(path),
            hint="use the asyncrl that wrote it",
        )
