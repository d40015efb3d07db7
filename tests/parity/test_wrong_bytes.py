"""A host record with wrong bytes fails once: it is dropped, computed again, and copied anew."""

from __future__ import annotations

import numpy as np

from banyan.engine.models import load_model
from banyan.tree import Tier, encode_tokens
from tests.parity.harness import Engine, plain_answers, prompts_of


def test_a_record_with_wrong_bytes_is_not_kept() -> None:
    model = load_model("tiny-linear")
    prompt = prompts_of(range(32, 127), groups=1, each=1, shared=120, own=20)[0]
    wanted = plain_answers(model.model, [prompt], 4)[0]
    with Engine(model, page_size=16, max_running=1, verify="all") as engine:
        copies = engine.cache.controller.totals
        engine.answer([prompt], 4)
        engine.evict_device()
        node = engine.cache.match(encode_tokens(prompt)).path[0]
        slots = node.parts[Tier.HOST][0].slots
        assert slots is not None
        engine.cache.stack.host[0].data[int(slots[1]), 5] ^= np.uint8(4)
        [(tokens, usage)] = engine.answer([prompt], 4)
        assert (tokens, usage.host) == (wanted, 0)
        stats = engine.core.stats()
        assert stats["cache"]["copies"]["load_back"]["mismatched"] == 1
        assert stats["cache"]["misses"]["load_failed"] == 1
        assert stats["cache"]["counts"]["dropped_wrong"] > 0
        engine.evict_device()
        [(tokens, usage)] = engine.answer([prompt], 4)
        assert tokens == wanted and usage.host > 100
        assert sum(t.mismatched for t in copies.values()) == 1, "not a second time"
