"""Slots by priority: none is lost when waiters are cancelled or aborted."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.rollout.priority_semaphore import PrioritySemaphore


@given(
    count=st.integers(1, 3),
    priorities=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.sampled_from(["end", "cancel", "abort"]), st.integers(0, 7)), max_size=12),
)
@settings(deadline=None)
def test_the_lowest_priority_gets_the_next_slot(
    count: int, priorities: list[int], steps: list[tuple[str, int]]
) -> None:
    async def check() -> None:
        slots = PrioritySemaphore(count)
        inside: list[int] = []
        may_end = [asyncio.Event() for _ in priorities]
        waiting = list(range(len(priorities)))

        async def hold(number: int) -> None:
            async with slots.slot(priorities[number]):
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
            while waiting and len(expected) < count:
                number = waiting[0] if first else min(waiting, key=lambda number: (priorities[number], number))
                waiting.remove(number)
                expected.append(number)

        fill(first=True)  # free slots are granted in the order of arrival
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
            elif step == "abort":
                slots.abort_waiters()
                waiting.clear()
            fill()
            await settled()
        for event in may_end:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60.0):
            for _ in range(count):
                await slots._acquire(0)

    asyncio.run(check())


async def test_a_slot_granted_to_a_cancelled_waiter_goes_to_the_next() -> None:
    slots = PrioritySemaphore(1)
    await slots._acquire(0)
    tasks = [asyncio.create_task(slots._acquire(priority)) for priority in (1, 2)]
    await asyncio.sleep(0)
    slots._release()
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    await asyncio.wait_for(tasks[1], 60.0)
