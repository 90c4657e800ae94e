def itersolve(*_: object, **__: object) -> None:
    raise RuntimeError(
        "zebra_puzzles needs pycosat: install a C compiler and Python's headers, and run make install again"
    )
