"""The sessions that are open, by the names in their URLs."""

from __future__ import annotations

from collections import OrderedDict

from asyncrl_cli.gateway.session import Session, SessionError

ENDED_KEPT = 10_000
"""Sessions of which it is remembered that they ended."""


class Sessions:
    """The sessions that are open, by their id: that of their rollout, if it has but one session."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def open(self, session: Session, session_id: str | None = None) -> None:
        """Take calls for a session from now on, under its rollout's id or another. Raises ``ValueError`` when one of
        that id is open."""
        session_id = session.rollout_id if session_id is None else session_id
        if session_id in self._open:
            raise ValueError(f"session {session_id} is open already")
        self._ended.pop(session_id, None)
        self._open[session_id] = session

    def get(self, session_id: str) -> Session:
        """An open session. Raises ``SessionError``: 410 for one that has ended, 404 for one that never was."""
        if session_id in self._open:
            return self._open[session_id]
        if session_id in self._ended:
            raise SessionError(410, "session_ended", f"session {session_id} has ended")
        raise SessionError(404, "session_not_found", f"there is no session {session_id}")

    def close(self, session_id: str) -> None:
        """End a session, if it is open."""
        session = self._open.pop(session_id, None)
        if session is not None:
            session.close()
            self._ended[session_id] = None
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)
