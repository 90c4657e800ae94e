def itersolve(*_: object, **__: object) -> None:
    hint = "install a C compiler and Python's headers, then pip install --force-reinstall pycosat==0.6.6"
    raise RuntimeError(f"zebra_puzzles needs pycosat: {hint}")
