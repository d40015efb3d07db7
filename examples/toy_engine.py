"""An engine that is not Banyan's, on `PrefixCache` alone: `python examples/toy_engine.py`.

Its model caches, for each token, a number that depends on the whole prefix, and reads them back to
go on, so an answer from wrong bytes would differ. Prompt A is asked again until the table shows it
computed, found on the device, and, once other prompts have pushed it out, found on the host.
"""

import time

from banyan import Buffer, CacheSpec, Component, Full, PrefixCache
from banyan.cache import AllocateOutcome
from banyan.pools.assembler import assemble
from banyan.pools.sizing import plan_sizes
from banyan.tiers.threaded import ThreadedCopyEngine
from banyan.tree import encode_tokens

PAGE, CHUNK = 4, 16
SPEC = CacheSpec((Component("full", Full(), (Buffer("sum", 0, (1,), "int32"),)),), PAGE)
SIZES = {"device_bytes": 320, "host_bytes": 2048, "max_running": 1, "chunk": CHUNK}
PLAN = plan_sizes(SPEC, **SIZES, state_interval=None)
STACK = assemble(SPEC, PLAN)
CACHE = PrefixCache(STACK, ThreadedCopyEngine(STACK, clock=time.monotonic))


def forward(lease, tokens, stop):
    """Continue the running number over tokens[lease.length:stop], in the device pool's own rows."""
    if lease.ticket is not None:
        lease.ticket.wait_layer(0)  # the bytes of a load-back, before they are read
    rows, slots = STACK.device[0].buffers[0, "sum"], lease.pages(0).slots
    start = lease.length
    value = int(rows[slots[(start - 1) // PAGE], (start - 1) % PAGE]) if start else 0
    for at in range(start, stop):
        value = (31 * value + tokens[at]) % 1_000_003
        rows[slots[at // PAGE], at % PAGE] = value
    return value


def ask(tokens):
    """One prompt: match, acquire, compute what is missing chunk by chunk, commit, release."""
    CACHE.poll()
    key = encode_tokens(tokens)
    while (lease := CACHE.acquire_if_ready(CACHE.match(key))) is None:
        CACHE.poll()  # copies still run that hold the slots of its load-back
    while lease.length < len(tokens):
        stop = min(lease.length + CHUNK, len(tokens))
        while CACHE.allocate(lease, stop) is AllocateOutcome.PENDING:
            CACHE.poll()
        value = forward(lease, tokens, stop)
        CACHE.advance(lease, stop)
        CACHE.commit(lease, key)
    CACHE.release(lease)
    return value, len(tokens) - lease.boundary, lease.device_len, lease.host_len


if __name__ == "__main__":
    prompts = {name: list(range(100 * i, 100 * i + 40)) for i, name in enumerate("ABCD")}
    print(f"{'prompt':8}{'answer':>8}{'computed':>10}{'device':>8}{'host':>6}")
    for name in "AABCDA":
        answer, computed, device, host = ask(prompts[name])
        print(f"{name:8}{answer:8}{computed:10}{device:8}{host:6}")
    CACHE.check()
    CACHE.close()
