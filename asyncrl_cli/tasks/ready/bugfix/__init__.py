"""The ready task ``bugfix``: small Python repositories with a seeded bug, fixed with a shell, judged by hidden tests.

- ``functions``: the library that repositories are made of, and random arguments for it;
- ``mutations``: where a function can go wrong, and how;
- ``repository``: files and hidden tests of one row;
- ``demonstrations``: how the shell is used, for a warm start;
- ``task``: the episode and its reward.
"""
