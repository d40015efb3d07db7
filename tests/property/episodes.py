"""Seeded runs of the driver: a cache of random configuration under random operations."""

from __future__ import annotations

import random

from banyan.tree import Mark
from tests.property.driver import Driver
from tests.support.rig import Rig, toy_spec

WRITE_POLICIES = ("write_through", "write_back", "write_through_selective", "write_through", "none")
EVICT_POLICIES = ("lru", "lfu", "slru", "fifo", "priority")
WEIGHTS = {
    "begin": 14,
    "compute": 34,
    "commit": 16,
    "release": 6,
    "finish": 14,
    "poll": 10,
    "start": 0.5,
    "evict": 5,
    "rare": 0.5,
}


def random_step(driver: Driver, r: random.Random) -> None:
    """One operation chosen by `r`, weighted towards what requests do."""
    match r.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "begin":
            driver.begin(r.randrange(2), r.randrange(61), r.randrange(20), r.randrange(1024))
        case "compute":
            driver.compute(r.randrange(8), r.randrange(16))
        case "commit":
            driver.commit(r.randrange(8), r.choices(list(Mark), (3, 1, 1, 1, 6))[0])
        case "release":
            driver.release(r.randrange(8))
        case "finish":
            driver.finish(r.randrange(8), r.random() < 0.9)
        case "poll":
            driver.poll()
        case "start":
            driver.start(r.randrange(8))
        case "evict":
            percents = [r.choice((0, 50, 100, 100, 101)) for _ in range(driver.width)]
            driver.evict(int(r.random() < 0.2), percents)
        case _:
            hold = r.random() < 0.3
            r.choice((driver.flush, lambda: driver.wait(40), lambda: driver.hold(hold)))()


def episode(kind: str, seed: int, operations: int) -> Driver:
    """A cache of random configuration under `operations` random operations, to the end."""
    r = random.Random(f"{kind}/{seed}")
    page_size = r.choice((1, 2, 4))
    room = r.choice((1, 2))
    tokens = {"full": 160 * room, "window": 96 * room, "narrow": 72 * room}
    sizes = {**{name: n // page_size for name, n in tokens.items()}, "state": 6 * room}
    device = [sizes[c.name] for c in toy_spec(kind).components]
    rig = Rig(
        kind=kind,
        page_size=page_size,
        window=r.choice((3, 8, 9)),
        device=device,
        host=[n * r.choice((1, 2)) for n in device],
        write_policy=WRITE_POLICIES[seed % len(WRITE_POLICIES)],
        evict_policy=r.choice(EVICT_POLICIES),
        verify=r.random() < 0.3,
        threshold=r.choice((1, 1, 8)),
    )
    driver = Driver(rig, r)
    for step in range(operations):
        try:
            random_step(driver, r)
        except Exception as error:
            error.add_note(f"{kind}, seed {seed}, step {step}, {rig.write_policy}")
            raise
    driver.drain()
    return driver
