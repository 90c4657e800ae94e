"""Ranks connect at a port that no other process can take in the meantime."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
from ranks import LIMIT_S, forked

pytestmark = pytest.mark.stack


def meet(rank: int, port: int, listener: socket.socket | None, answer: Path) -> None:
    import torch

    from asyncrl_cli.train.deepspeed_engine import join_process_group

    join_process_group(rank, 2, "127.0.0.1", port, False, listener)
    numbers = torch.tensor([10.0**rank])
    torch.distributed.all_reduce(numbers)
    answer.write_text(str(numbers.item()))


def test_a_port_is_held_until_the_ranks_meet(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=r".*") as refused:
            socket.create_server(("127.0.0.1", port)).close()
        assert refused.value.errno == errno.EADDRINUSE
        ranks = [
            forked().Process(target=meet, args=(rank, port, None if rank else listener, tmp_path / str(rank)))
            for rank in (1, 0)
        ]
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [(tmp_path / name).read_text() for name in "01"] == ["11.0", "11.0"]
