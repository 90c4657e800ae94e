"""Questions over a local corpus: a 0.3M-parameter model learns to search, hop by hop.

The corpus has short notes about people. SQLite's full-text search indexes it. A question needs one to three notes:

    user       home of boss of mira?
    assistant  (calls search with words = boss mira)
    tool       boss of mira: toke
               boss of lusa: mira
    assistant  (calls search with words = home toke)
    tool       home of toke: velno
    assistant  #velno

A search finds notes with all its words, so it may also find a note about somebody else. The rows of ``demonstrations``
teach a model that can search but mostly guesses a town; the reward teaches the rest.

Invariant: a hash of a question decides its split (``prompts.is_held_out``). Only ``_draw`` draws questions.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import Split
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out
from asyncrl_cli.tasks.tools import ToolTask, call_message, result_message

PEOPLE, TOWNS = 400, 40
MAX_NOTES = 3
"""Notes that one search returns at most."""
CAREFUL = 0.3
"""Share of the demonstrations' first replies that search; the others guess."""
SLIP = 0.05
"""Probability that a later reply of a demonstration guesses."""
NO_NOTES = "nothing"


class Search(ToolTask):
    """The task."""

    def __init__(self, max_hops: int = 3) -> None:
        """A question names ``max_hops`` notes at most. Raises ``ValueError`` for invalid options."""
        if not 1 <= max_hops <= 5:
            raise ValueError(f"1 <= max_hops <= 5 must hold, not max_hops={max_hops}")
        self._max_hops = max_hops
        rng = random.Random("corpus")
        self._people = _names(rng, PEOPLE, syllables=2)
        self._towns = _names(rng, TOWNS, syllables=3)
        # Nobody has more than two subordinates, so a search for the boss of a person always returns the right note.
        self._boss = dict(zip(self._people, rng.sample(self._people * 2, PEOPLE), strict=True))
        self._home = {person: rng.choice(self._towns) for person in self._people}
        notes = [f"boss of {person}: {boss}" for person, boss in self._boss.items()]
        notes += [f"home of {person}: {town}" for person, town in self._home.items()]
        # Episodes search in several threads; SQLite serializes them.
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE notes USING fts5(text)")
        self._index.executemany("INSERT INTO notes VALUES (?)", [(note,) for note in notes])

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows of the split; row ``i`` is the same for every size. Questions may repeat."""

        def row(index: int) -> Prompt:
            uid = f"search/{split}/{index}"
            people = self._draw(random.Random(uid), split)
            return Prompt(uid, _question(people), {"answer": self._home[people[-1]], "hops": len(people)})

        return LazyPrompts(size, row)

    def tools(self, prompt: Prompt) -> Sequence[Callable[..., Any]]:
        return [self.search]

    def judge(self, prompt: Prompt, text: str) -> float:
        """1.0 for the right town after a ``#``, else 0.0."""
        return float(text.strip() == f"#{prompt.fields['answer']}")

    def search(self, words: str) -> str:
        """Find notes that contain all words.

        words: such as boss mira
        """
        phrases = " ".join(f'"{word}"' for word in re.findall(r"\w+", words))  # quoted: no operators of FTS5
        if not phrases:
            return NO_NOTES
        query = "SELECT text FROM notes WHERE notes MATCH ? ORDER BY rank, rowid LIMIT ?"
        return "\n".join(text for (text,) in self._index.execute(query, (phrases, MAX_NOTES))) or NO_NOTES

    def demonstration(self, rng: random.Random, clean: bool) -> list[Message]:
        """A conversation about a question of the train split, up to some reply of the policy. The reply is faultless
        (``clean``), or often a guess."""
        people = self._draw(rng, "train")
        messages: list[Message] = [{"role": "user", "content": _question(people)}]
        calls = [f"boss {person}" for person in people[:-1]] + [f"home {people[-1]}"]
        searches = rng.randint(0, len(calls))  # before the reply
        for index, words in enumerate(calls[:searches]):
            messages += [call_message(index, "search", {"words": words}), result_message(index, self.search(words))]
        guess_probability = 0.0 if clean else SLIP if searches else 1 - CAREFUL
        if rng.random() < guess_probability:
            answer = rng.choice(self._towns)
        elif searches < len(calls):
            return [*messages, call_message(searches, "search", {"words": calls[searches]})]
        else:
            answer = self._home[people[-1]]
        return [*messages, {"role": "assistant", "content": f"#{answer}"}]

    def _draw(self, rng: random.Random, split: Split) -> list[str]:
        """The people of a random question of the split, from the one in its text to the one whose home it asks for."""
        while True:
            people = [rng.choice(self._people)]
            for _ in range(rng.randrange(self._max_hops)):
                people.append(self._boss[people[-1]])
            if is_held_out(_question(people)) == (split == "eval"):
                return people


def demonstrations(split: Split, size: int, clean: bool = False) -> Iterator[dict[str, Any]]:
    """Yield rows for `model.warm_start.data`: conversations that end with a reply to learn."""
    task, rng = Search(), random.Random(0)
    for _ in range(size):
        yield {"messages": task.demonstration(rng, clean)}


def _question(people: Sequence[str]) -> str:
    return f"home of {'boss of ' * (len(people) - 1)}{people[0]}?"


def _names(rng: random.Random, size: int, syllables: int) -> list[str]:
    """Different names of this many syllables."""
    names: dict[str, None] = {}
    while len(names) < size:
        names["".join(rng.choice("bdfgklmnprstv") + rng.choice("aeiou") for _ in range(syllables))] = None
    return list(names)
