"""Places by priority: none is lost, whoever is cancelled or turned away."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.rollout.priority_semaphore import Aborted, Slots


@given(
    places=st.integers(1, 3),
    priorities=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.sampled_from(["end", "cancel", "turn away"]), st.integers(0, 7)), max_size=12),
)
@settings(deadline=None)
def test_the_lowest_priority_has_the_next_place(
    places: int, priorities: list[int], steps: list[tuple[str, int]]
) -> None:
    async def check() -> None:
        slots = Slots(places)
        inside: list[int] = []
        may_end = [asyncio.Event() for _ in priorities]
        waiting = list(range(len(priorities)))

        async def hold(number: int) -> None:
            async with slots.one(priorities[number]):
                inside.append(number)
                try:
                    await may_end[number].wait()
                finally:
                    inside.remove(number)

        tasks = [asyncio.create_task(hold(number)) for number in waiting]
        expected: list[int] = []

        async def settled() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            assert sorted(inside) == sorted(expected)

        def fill(first: bool = False) -> None:
            while waiting and len(expected) < places:
                number = waiting[0] if first else min(waiting, key=lambda number: (priorities[number], number))
                waiting.remove(number)
                expected.append(number)

        fill(first=True)  # nobody else was there
        await settled()
        for step, chosen in steps:
            number = chosen % len(priorities)
            if step == "end" and number in expected:
                may_end[number].set()
                expected.remove(number)
            elif step == "cancel":
                tasks[number].cancel()
                if number in waiting:
                    waiting.remove(number)
                if number in expected:
                    expected.remove(number)
            elif step == "turn away":
                slots.turn_away()
                waiting.clear()
            fill()
            await settled()
        for event in may_end:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60.0):
            for _ in range(places):
                await slots._take(0)

    asyncio.run(check())


def test_a_place_that_comes_with_the_cancellation_goes_to_the_next() -> None:
    async def check() -> None:
        slots = Slots(1)
        await slots._take(0)
        tasks = [asyncio.create_task(slots._take(priority)) for priority in (1, 2)]
        await asyncio.sleep(0)
        slots._give()
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await asyncio.wait_for(tasks[1], 60.0)

    asyncio.run(check())


def test_who_is_turned_away_is_aborted_without_a_token() -> None:
    async def check() -> None:
        slots = Slots(1)
        await slots._take(0)
        task = asyncio.create_task(slots._take(0))
        await asyncio.sleep(0)
        slots.turn_away()
        with pytest.raises(Aborted) as aborted:
            await task
        assert aborted.value.segments == []

    asyncio.run(check())
