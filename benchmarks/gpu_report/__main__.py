"""Check and measure asyncrl on this machine's GPUs. If one part fails, the others still run.

    make gpu    or    PYTHONPATH=benchmarks python -m gpu_report [--device cuda|cpu] [--out FOLDER] [--only PART ...]
                      [--model FOLDER]

Writes `report.json` and one page, `report.md`, which a user can send. It takes about fifteen minutes on a GPU. With
`--device cpu` every part runs in a smaller size: everything except the device is tested. `--model` names the folder of
a saved model, which is trained for some steps, with its real vocabulary. No part needs a model hub.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_report import environment, parts
from gpu_report.numerics import numerics, repeats
from gpu_report.page import page
from gpu_report.runs import Bench

Part = Callable[[Bench], dict[str, Any]]
PARTS: dict[str, Part] = {
    "environment": environment.versions_and_devices,
    "doctor": environment.doctor,
    "numerics": numerics,
    "repeats": repeats,
    "quickstart": parts.quickstart,
    "exactness": parts.exactness,
    "publish": parts.publish,
    "trainer": parts.trainer,
    "engine": parts.engine,
    "ratio": parts.ratio,
    "memory": parts.memory,
    "model": parts.own_model,
    "resume": parts.kill_and_resume,
}
"""In this order. Parts share runs, so a later part often takes no time."""


Results = dict[str, dict[str, Any]]


def carry_out(
    bench: Bench, chosen: Mapping[str, Part], note: Callable[[str], None], keep: Callable[[Results], None]
) -> Results:
    """The figures of each part, or its error with traceback. After each part ``keep`` is called with all results so
    far."""
    results: Results = {}
    for name, part in chosen.items():
        note(f"{name} ...")
        started = time.monotonic()
        try:
            result: dict[str, Any] = {"ok": True, "figures": part(bench)}
        except Exception as error:
            result = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        results[name] = result | {"seconds": round(time.monotonic() - started, 1)}
        release_gpu()
        keep(results)
        note(f"{name} {'done' if result['ok'] else 'FAILED: ' + result['error'].splitlines()[0]}")
    return results


def release_gpu() -> None:
    """Return the GPU memory that torch keeps for this process: the engines of later parts measure what is free."""
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report and of all runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a saved model for the part `model`")
    options = parser.parse_args()
    bench = Bench(options.device, options.out.absolute(), options.model and options.model.absolute())
    bench.out.mkdir(parents=True, exist_ok=True)

    def keep(results: Results) -> None:
        report = {"device": options.device, "gpus": bench.gpus, "parts": results}
        (bench.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (bench.out / "report.md").write_text(page(report))

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    chosen = {name: PARTS[name] for name in options.only if name != "model" or bench.model is not None}
    results = carry_out(bench, chosen, note, keep)
    print(bench.out / "report.md")
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
