"""The rows of the warm start's updates."""

from __future__ import annotations

from itertools import islice

import pytest

from asyncrl_cli.orchestrator.warm_start import batches_of
from asyncrl_cli.records.training import SupervisedRow
from asyncrl_cli.spec.inputs import WarmStart

ROWS = [SupervisedRow((row, row), (False, True)) for row in range(10)]


@pytest.mark.parametrize(("batch_size", "sizes"), [(32, [30]), (12, [12, 12, 6]), (15, [15, 15])])
def test_epochs_train_every_row_equally_often(batch_size: int, sizes: list[int]) -> None:
    warm_start = WarmStart.model_validate({"data": {"path": "a"}, "epochs": 3, "batch_size": batch_size})
    batches = list(batches_of(ROWS, warm_start, seed=0))
    assert [len(batch) for batch in batches] == sizes and len(sizes) == warm_start.updates(len(ROWS))
    trained = [row.ids[0] for batch in batches for row in batch]
    assert all(sorted(trained[start : start + 10]) == list(range(10)) for start in (0, 10, 20))
    assert trained[:10] != trained[10:20]
    unlimited = warm_start.model_copy(update={"epochs": None, "steps": 5})
    assert [len(batch) for batch in islice(batches_of(ROWS, unlimited, seed=0), 5)] == [batch_size] * 5
