"""Mutates specs for the fuzzer: their structure, values, bytes, files and `--set`."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from asyncrl_cli.convert.table import table
from asyncrl_cli.spec.keys import keys

ROOT = Path(__file__).parents[2]
LEAVES = [path for path, key in keys().items() if not key.opens]
NUMBERS: list[Any] = [0, 1, -1, 2, 7, 8, 64, 0.0, -0.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
LARGE: list[Any] = [2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, -(2**63) - 1]
WORDS = [
    *("", " ", "x", "1", "1.0", "true", "null", "~", "no", "<<", "1e-4", "0x1F", "0o17", "1_000", ".inf"),
    "2024-01-01",
]
ODD = [
    *("a b", "a\nb", "a\tb", "\0", "\x7f", "\x85", "\u2028", "\u200d", "é", "\U0001f600", "\ufeff", "x" * 300),
    "x" * 5000,
]
NAMED = ["../" * 50, "/", ".", "..", "~nobody/x", "a:b", "a.b:c.d", "hf:a/b", "gym/x", "http://h", "env:HOME", "math"]
VARIABLES = ["${env:HOME}", "${env:NOT_THERE}", "${env:NOT_THERE:-3}", "${env:", "$$${env:A}"]
NESTED: list[Any] = [[], [1], [None], [[]], ["x", "y"], [1, "x", {}], {}, {"a": 1}, {"": 1}, {"a.b": 1}]
SCALARS = [True, False, None, *NUMBERS, *LARGE, *WORDS, *ODD, *NAMED, *VARIABLES, *NESTED]
MARKS = [
    *("\t", "\n", "\r", "\r\n", " ", "  ", ":", ": ", "- ", "? ", "#", " #", "'", '"', "[", "]", "{", "}", ","),
    *("&a ", "*a"),
]
TAGS = [
    *("!", "!!int ", "!!binary ", "|", ">", "|+2\n", "%", "%YAML 1.1\n", "---", "\n---\n", "...", "@", "`"),
    *("\\", '"\\x"'),
]
RARE = [
    *("\0", "\x07", "\x85", "\u2028", "\ufeff", "<<: ", "<<: *a", "=", "~", "${env:", "{{x}}", "é"),
    *("\U0001f600", "1e", "0x"),
]
TOKENS = [*MARKS, *TAGS, *RARE, '"\\ud800"']
FILES = ["\ud800", "\0", "", ".", "/", "gone.yaml", "spec.yaml", "/dev/null", "/dev/zero", "x" * 300, "../" * 200]
FOREIGN = [name for trainer in ("verl", "trl", "prime_rl") for name in table(trainer).defaults]


@dataclass(slots=True)
class Case:
    """One mutated spec: the file to read, the overrides, and what was done to it."""

    kind: str
    path: Path
    overrides: list[str] = field(default_factory=list)


class Mutator:
    """Creates cases in its own folder, all from one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        bases = [*sorted((ROOT / "specs").glob("*.yaml")), *sorted((ROOT / "templates").glob("*/spec.yaml"))]
        self.texts = [path.read_text(encoding="utf-8") for path in bases]
        self.trees = [yaml.safe_load(text) for text in self.texts]
        self.ordinary = [parent[name] for tree in self.trees for parent, name in nodes(tree)]
        for file in [
            *ROOT.glob("specs/*.*"),
            *ROOT.glob("templates/*/*.jsonl"),
            *ROOT.glob("templates/*/*.py"),
        ]:  # files that the specs refer to
            shutil.copy(file, folder)
        shutil.copytree(ROOT / "specs/models", folder / "models")
        once = [self.raw, self.trick, self.extends, self.override, self.foreign]
        self.kinds: list[Callable[[], Case]] = [*[self.structure] * 2, *[self.scalar] * 2, *once]

    def case(self) -> Case:
        return self.random.choice(self.kinds)()

    def write(self, content: str | bytes, name: str = "spec.yaml") -> Path:
        path = self.folder / name
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        path.write_bytes(data)
        return path

    def dumped(self, tree: Any) -> Path:
        flow = self.random.choice([None, False, True])
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=flow)
        return self.write(text)

    def tree(self) -> Any:
        return copy.deepcopy(self.random.choice(self.trees))

    def value(self) -> Any:
        """An odd value, or one of a spec."""
        return copy.deepcopy(self.random.choice(self.random.choice([SCALARS, self.ordinary])))

    def fitting(self, path: str) -> Any:
        """A value of the kind that a key takes: like its default, or one of its choices."""
        annotation, default = keys()[path].field.annotation, keys()[path].default
        choices = [part for part in get_args(annotation) if isinstance(part, (str, int))]
        if choices:
            return self.random.choice(choices)
        if isinstance(default, bool):
            return self.random.random() < 0.5
        if isinstance(default, int):
            return self.random.choice([default, default + 1, default * 2, 1])
        if isinstance(default, float):
            return default * self.random.choice([0.5, 1.0])
        return default if isinstance(default, (str, list, dict)) else None

    def key(self) -> str:
        """An existing key, a wrong one, or one of another trainer."""
        last = self.random.choice(list(keys())).rpartition(".")[2]
        odd = ["", "0", "a.b", "é", "x" * 300, "-", "extends", "\n", "*", "name", last.upper(), last + "s", last[:-1]]
        return self.random.choice([last, last, self.random.choice(FOREIGN), self.random.choice(odd)])

    def structure(self) -> Case:
        """Nodes are removed, doubled, renamed, moved, wrapped or replaced."""
        tree = self.tree()
        for _ in range(self.random.choice([1, 1, 1, 2, 4, 12])):
            locations = [*nodes(tree)]
            parent, name = self.random.choice(locations)
            match self.random.randrange(7):
                case 0:
                    del parent[name]
                case 1:
                    parent[name] = self.value()
                case 2 if isinstance(parent, dict):
                    parent[self.key()] = parent.pop(name)
                case 3:
                    parent[name] = [parent[name]]
                case 4:
                    parent[name] = {self.key(): parent[name]}
                case 5:
                    other, beside = self.random.choice(locations)
                    if beside in (other if isinstance(other, dict) else range(len(other))):
                        parent[name] = copy.deepcopy(other[beside])
                case _ if isinstance(parent, dict):
                    parent[self.key()] = self.value()
            if not tree:
                break
        return Case("structure", self.dumped(tree))

    def scalar(self) -> Case:
        """A few keys of the catalogue, set to odd values or to fitting ones."""
        tree = self.tree()
        for _ in range(self.random.choice([1, 1, 3])):
            path = self.random.choice(LEAVES)
            if self.random.random() < 0.5 and "*" not in path:
                set_at(tree, path.split("."), self.fitting(path))
            else:
                set_at(tree, path.replace("*", "x").split("."), self.value())
        return Case("scalar", self.dumped(tree))

    def raw(self) -> Case:
        """Bytes of the text are flipped, removed, doubled, or replaced by tokens of YAML."""
        data = bytearray(self.random.choice(self.texts).encode())
        for _ in range(self.random.choice([1, 1, 2, 5, 30])):
            at = self.random.randrange(len(data) + 1)
            end = min(len(data), at + self.random.choice([0, 1, 1, 5, 40]))
            token = self.random.choice(TOKENS).encode("utf-8", "surrogatepass")
            noise = bytes(self.random.randrange(256) for _ in range(self.random.randrange(4)))
            data[at:end] = self.random.choice([b"", token, token, noise, bytes(data[at:end]) * 2])
            if not data:
                break
        return Case("raw bytes", self.write(bytes(data)))

    def trick(self) -> Case:
        """Anchors, merges, tags, nesting and lengths that may cause errors in a parser."""
        size = self.random.choice([1, 3, 12, 12, 100, 100, self.random.choice([300, 1500, 1500, 9000])])
        few = self.random.randrange(2, 12)
        open_, close = self.random.choice(["[]", "{}", ("- ", ""), ("? ", ""), ("a: ", ""), ("{a: ", "}")])
        text = self.random.choice(["extends: quickstart.yaml\n", self.random.choice(self.texts), ""])
        where = self.random.choice(["model.init.config", "task.options", "rollout.engine_args", "foreign", "name"])
        match self.random.randrange(14):
            case 0:
                body = f"{open_ * size}1{close * size}"
            case 1:
                names = "abcdefghijkl"
                body = "\n" + "".join(
                    f"  {now}: &{now} {self.collection(f'*{above}', few)}\n"
                    for above, now in zip("0" + names, names, strict=False)
                ).replace("*0", "1")
            case 2:
                body = "\n  a: &a {x: 1}\n" + "  <<: *a\n" * size
            case 3:
                body = "&a {b: *a, c: [*a], <<: *a}"
            case 4:
                body = "\n" + "".join(f"  key{index}: {index}\n" for index in range(size))
            case 5:
                body = f"[{', '.join(str(index) for index in range(size))}]"
            case 6:
                body = "'" + self.random.choice(["$", "${env:A", "${env:A:-", "${env:A:-x}", "$${env:"]) * size + "'"
            case 7:
                body = self.random.choice(["9", "0x9", "0o7", "1.", "1e9", "_", "1_", ".", "-", "+", "~"]) * size
            case 8:
                body = "\n" + "".join(" " * index + "a:\n" for index in range(1, min(size, 300)))
            case 9:
                body = "|\n" + "  line: [\n" * size
            case 10:
                body = f"{self.random.choice(['!!int', '!!float', '!!bool', '!!set', '!!python/name:os', '!x'])} {few}"
            case 11:
                body = "\n" + "  a: 1\n" * size
            case 12:
                body = "#" * size + "\n  ? [" + "x, " * few + "]\n  : 1"
            case _:
                body = (
                    '"'
                    + self.random.choice(["\\ud800", "\\ud83d\\ude00", "\\0", "\\x1b[2J", "\\n", "\\u2028"]) * few
                    + '"'
                )
        parts = where.split(".")
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
        body = body.replace("\n", "\n" + "  " * (len(parts) - 1))
        added = "\n".join(lines) + f" {body}\n"
        return Case("YAML tricks", self.write(text + added))

    def collection(self, item: str, times: int) -> str:
        form = self.random.randrange(3)
        if form == 0:
            return f"[{', '.join([item] * times)}]"
        if form == 1:
            return f"{{{', '.join(f'k{index}: {item}' for index in range(times))}}}"
        return f"{{<<: [{', '.join(f'{{n: {item}}}' for _ in range(times))}]}}"

    def extends(self) -> Case:
        """Chains, diamonds, cycles and broken files under `extends`."""
        count = self.random.choice([1, 2, 5, 14, 45])
        for index in range(count):
            above = f"f{index - 1}.yaml"
            broken = self.random.choice(FILES)
            below = self.random.choice([above, [above] * 2, ["quickstart.yaml", above], above, [above, above, broken]])
            own: dict[str, Any] = {} if self.random.random() < 0.8 else {self.key(): self.value()}
            target = below if index else self.random.choice(["quickstart.yaml", "lora.yaml"])
            own = {"extends": target} | own
            self.write(json.dumps(own), f"f{index}.yaml")
        last = f"f{count - 1}.yaml"
        layer: dict[str, Any] = {"extends": self.random.choice([last, last, [last] * 2, [last] * 40, self.value()])}
        path = self.random.choice(LEAVES)
        odd = "*" in path or self.random.random() < 0.4
        set_at(layer, path.replace("*", "x").split("."), self.value() if odd else self.fitting(path))
        return Case("extends", self.write(json.dumps(layer)))

    def override(self) -> Case:
        """Values of `--set`, with valid specs."""
        overrides = []
        for _ in range(self.random.choice([1, 1, 1, 2, 6])):
            path = self.random.choice(LEAVES)
            if self.random.random() < 0.6:
                overrides.append(f"{path}={json.dumps(self.fitting(path))}")
                continue
            path = self.random.choice([path, self.key(), "a." * 200 + "b", f"task.{self.key()}.0"])
            odd = [str(self.value()), self.random.choice(TOKENS), "[" * 3000, "\udcff"]
            text = self.random.choice([json.dumps(self.value()), self.random.choice(odd)])
            overrides.append(self.random.choice([f"{path}={text}"] * 8 + [path, f"={text}", text]))
        return Case("--set", self.write(self.random.choice(self.texts)), overrides)

    def foreign(self) -> Case:
        """Keys of other trainers, in their own sections."""
        tree = self.tree()
        for name in self.random.sample(FOREIGN, self.random.randrange(1, 30)):
            above = self.random.choice([[], ["trainer"], ["actor_rollout_ref", "actor"], ["algorithm"], ["optim", "x"]])
            set_at(tree, [*above, *name.split(".")], self.value())
        return Case("other trainers' keys", self.dumped(tree))


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a tree, as the collection that contains it, and its key or index there."""
    for name, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, name
        if isinstance(value, (dict, list)):
            yield from nodes(value)


def set_at(tree: dict[str, Any], names: list[str], value: Any) -> None:
    """Set a value at a path; missing collections on the path are created."""
    for name in names[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[names[-1]] = value
