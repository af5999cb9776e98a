"""Random jobs, for the tests of orders and schedules."""

import dataclasses
import math

import numpy as np

from pcrshard.training.epoch_order import Geometry, Rules, epoch_order

SEED = 20240607


@dataclasses.dataclass
class Case:
    """One random job."""

    sizes: list[int]
    geometry: Geometry
    rules: Rules
    epoch: int
    world: int
    workers: int

    @classmethod
    def draw(cls, rng, last=None):
        world, slots = (int(n) for n in rng.integers(1, 7, 2))
        if rng.random() < 0.5:
            slots = world
        geometry = Geometry(
            math.lcm(world, slots) * int(rng.integers(1, 5)), slots, int(rng.integers(1, 6))
        )
        sizes = rng.integers(0, 31, rng.integers(1, 13)).tolist()
        missing = geometry.global_batch - sum(sizes)
        sizes[0] += max(missing, 1) if missing >= 0 else 0
        rules = Rules(
            int(rng.integers(2**63)),
            int(rng.integers(0, 8)),
            last or rng.choice(["drop", "pad", "short"]).item(),
        )
        return cls(
            sizes, geometry, rules, int(rng.integers(0, 1000)), world, int(rng.integers(1, 7))
        )

    @property
    def total(self):
        return sum(self.sizes)

    def order(self, geometry=None, history=()):
        return epoch_order(
            self.sizes, geometry or self.geometry, self.rules, epoch=self.epoch, history=history
        )


def cases(count, last=None):
    """Random jobs; a failure shows the number of its case."""
    print(f"{SEED = }")
    for number in range(count):
        yield Case.draw(np.random.default_rng([SEED, number]), last), number


def shards_of(ids, sizes):
    return np.repeat(np.arange(len(sizes)), sizes)[ids]
