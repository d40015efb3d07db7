"""Prints what a seeded run did, for comparison between processes.

python -m tests.property.trace tree|cache
"""

from __future__ import annotations

import hashlib
import random
import sys

from banyan.tree import Tier, encode_namespace
from tests.tree.plant import Plant


def tree_log(seed: int) -> list[str]:
    """Slots freed and matches given by a tree under random inserts, uses and evictions."""
    r = random.Random(seed)
    plant = Plant("full+window+state", page_size=2, window=5)
    log = []
    for _ in range(300):
        tokens = [r.randrange(2) for _ in range(2 * r.randrange(1, 9))]
        space = encode_namespace([("salt", str(r.randrange(3))), ("adapter", "x")])
        plant.insert(tokens, states=[len(tokens)], namespace=space)
        plant.use(tokens, space)
        need = [r.randrange(1 + n // 2) for n in plant.tree.device.evictable]
        freed = plant.evict(*need)
        assert freed is not None
        log.append(repr([freed.take(Tier.DEVICE, c).tolist() for c in range(3)]))
        log.append(repr(plant.match(tokens, space).boundary))
    log += [repr(node) for node in plant.nodes()]
    return log


def cache_log(seed: int) -> list[str]:
    """Every copy submitted, the counters and the tree after a random episode over the façade."""
    from tests.property.episodes import episode

    driver = episode("full+window+state", seed, 300)
    log = []
    for job in driver.rig.engine.submitted:
        blocks = [(b.component, b.src.tolist(), b.dst.tolist()) for b in job.blocks]
        log.append(repr((job.op_id, job.kind, blocks)))
    return [*log, repr(driver.cache.stats()), repr(driver.hits)]


def main(which: str) -> None:
    """Print one line per part of the log, and the digest of all."""
    logs = [tree_log(seed) if which == "tree" else cache_log(seed) for seed in range(3)]
    text = "\n".join(line for log in logs for line in log)
    print(len(text), hashlib.sha256(text.encode()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
