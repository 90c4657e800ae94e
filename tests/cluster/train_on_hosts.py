"""Trains a few steps with ranks on selected hosts, and saves the model. test_ranks.py runs this program on the head.

python train_on_hosts.py ADDRESS FOLDER CPUS_HELD_ON_THE_HEAD
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from train_one import SPEC, batch

from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.cluster import Actors, ray_cluster
from asyncrl_cli.orchestrator.trainers import TrainerRanks
from asyncrl_cli.spec.load import load_spec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import on_node

STEPS = 2


async def train(spec: ExperimentSpec, folder: Path) -> TrainerRanks:
    factory = ActorFactory(spec, folder, folder, folder)
    ranks = TrainerRanks(factory.trainer, factory.trainer_group(), folder, 120.0, print)
    await ranks.preload()
    await ranks.prepare_model()
    await ranks.start(None)
    for step in range(STEPS):
        await ranks.train_step(batch(step, 4))
    await ranks.save_model(folder / "model", folder / "adapter")
    return ranks


def main() -> None:
    address, folder, held = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    folder.mkdir()
    overrides = [f"runs_dir={folder.parent}", f"cluster.address='{address}'"]
    spec = load_spec(SPEC, overrides).spec
    with ray_cluster(spec, folder, Actors(0, spec.trainer.ranks)):
        import ray

        @ray.remote
        class Holder:
            def ready(self) -> None: ...

        holder = Holder.options(num_cpus=held, scheduling_strategy=on_node()).remote()
        ray.get(holder.ready.remote())
        locations = asyncio.run(train(spec, folder)).locations
    print(json.dumps([location.address for location in locations]))


if __name__ == "__main__":
    main()
