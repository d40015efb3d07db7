"""The oracle's bytes are what a slow definition says, and any other byte it reads is caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from banyan.engine.messages import GenerateRequest, Sampling
from banyan.engine.oracle import Emulation, OracleModel
from banyan.engine.oracle_buffers import WrongBytes
from banyan.engine.oracle_build import OracleCore, OracleOptions, build_oracle_core
from banyan.engine.oracle_hash import EMPTY, VOCAB_SIZE, answer, as_words, extended, mixed, salts
from banyan.engine.oracle_ledger import Code, Ledger
from banyan.engine.oracle_presets import PRESETS, oracle_spec
from banyan.engine.plans import SeqInput
from banyan.errors import ConfigError, CopyError, LeaseError, RankError
from banyan.lease import Lease
from banyan.spec import Buffer, Full, Point, Window
from banyan.tree import encode_tokens

PAGE = 16
WINDOW = 40
MASK = (1 << 64) - 1


# ---- the slow definition -------------------------------------------------------------------------


def slow_hash(tokens: list[int], value: int = EMPTY) -> int:
    for token in tokens:
        value = (value * 0x5851F42D4C957F2D + token + 1) & MASK
    return value


def slow_mix(value: int, salt: int) -> int:
    word = (value + salt) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def slow_entry(tokens: list[int], buffer: Buffer, rank: int = 0) -> bytes:
    own = salts(buffer.layer, buffer.name, rank, -(-buffer.entry_bytes // 8))
    words = [slow_mix(slow_hash(tokens), int(salt)) for salt in own]
    return b"".join(w.to_bytes(8, "little") for w in words)[: buffer.entry_bytes]


def slow_answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(slow_mix(slow_hash(tokens), 0x13198A2E03707344) % VOCAB_SIZE)
    return tokens[len(prompt) :]


def prompt(name: str, count: int) -> list[int]:
    return random.Random(name).choices(range(VOCAB_SIZE), k=count)


@pytest.mark.parametrize("count", [1, 2, 63, 1000])
def test_hashes_are_those_of_the_slow_definition(count: int) -> None:
    tokens = prompt("hash", count)
    found = extended(EMPTY, as_words(tokens)).tolist()
    assert found == [slow_hash(tokens[: i + 1]) for i in range(count)]
    middle = count // 2
    later = extended(slow_hash(tokens[:middle]), as_words(tokens[middle:])).tolist()
    assert later == found[middle:]


def test_bytes_and_answers_are_those_of_the_slow_definition() -> None:
    tokens = prompt("bytes", 40)
    hashes = extended(EMPTY, as_words(tokens))
    for shape, dtype in (((2,), "int32"), ((1,), "int32"), ((3,), "int8"), ((5,), "float16")):
        buffer = Buffer("k", 1, shape, dtype)
        entries = Code.of(buffer, 3).encode(hashes)
        for at in (0, 7, 39):
            assert entries[at].tobytes() == slow_entry(tokens[: at + 1], buffer, 3)
    assert answer(tokens, 12) == slow_answer(tokens, 12)


def test_every_layer_buffer_and_rank_has_bytes_of_its_own() -> None:
    hashes = extended(EMPTY, as_words(prompt("own", 64)))
    own = [(layer, name, rank) for layer in (0, 1) for name in ("k", "v") for rank in (0, 1)]
    found = [mixed(hashes, salts(*which, 1)).tobytes() for which in own]
    assert len(set(found)) == len(own)
    same = Buffer("index", 0, (1,), "int32", replicated=True)
    assert np.array_equal(Code.of(same, 0).encode(hashes), Code.of(same, 5).encode(hashes))


def test_all_bytes_of_an_entry_depend_on_the_prefix() -> None:
    hashes = extended(EMPTY, as_words(prompt("spread", 4096)))
    raw = mixed(hashes, salts(0, "k", 0, 2)).view(np.uint8)
    for column in raw.T:
        assert len(set(column.tolist())) == 256


def test_a_ledger_with_too_few_and_too_short_rows_gives_the_same() -> None:
    code = Code.of(Buffer("k", 0, (1,), "int32"), 0)
    small = Ledger([code], rows=1, tokens=4)
    lists = [prompt(f"ledger{i}", 50 + i) for i in range(3)]
    for stop in (10, 11, 12, 50):
        for batch in ([0], [1, 2], [0, 1, 2]):
            rows = small.rows_of([(lists[i], stop) for i in batch])
            assert len(set(rows)) == len(batch)
            for i, row in zip(batch, rows, strict=True):
                expected = extended(EMPTY, as_words(lists[i][:stop]))
                assert np.array_equal(small.hashes[row, 1 : stop + 1], expected)
                assert np.array_equal(small.entries[0][row, :stop], code.encode(expected))
    with pytest.raises(ValueError, match="history has 50"):
        small.rows_of([(lists[0], 51)])


# ---- reads ---------------------------------------------------------------------------------------


class Bench:
    """A cache with an oracle, driven by hand: one forward at a time."""

    def __init__(self, preset: str, **model: object) -> None:
        self.core: OracleCore = build_oracle_core(
            OracleOptions(
                preset=preset,
                page_size=PAGE,
                window=WINDOW,
                device_bytes=1 << 20,
                host_bytes=1 << 20,
                max_running=4,
                chunk=64,
                longest=1024,
            )
        )
        self.cache, self.spec = self.core.cache, self.core.cache.spec
        self.stack = self.cache.stack
        self.oracle = OracleModel(self.stack, **model) if model else self.core.oracle

    def seq(self, lease: Lease, tokens: list[int], stop: int) -> SeqInput:
        start = lease.length
        new = tokens[start:stop]
        return SeqInput(new, start, lease.tables, lease.ticket, lease.present, tokens)

    def acquire(self, tokens: list[int]) -> Lease:
        return self.cache.acquire(self.cache.match(encode_tokens(tokens)))

    def run(self, lease: Lease, tokens: list[int], stop: int, commit: bool = True) -> None:
        self.cache.allocate(lease, stop)
        self.oracle.forward([self.seq(lease, tokens, stop)])
        self.cache.advance(lease, stop)
        if commit:
            self.cache.commit(lease, encode_tokens(tokens))

    def ready(self, lease: Lease, tokens: list[int]) -> SeqInput:
        """The next token's forward, its slots allocated."""
        self.cache.allocate(lease, lease.length + 1)
        return self.seq(lease, tokens, lease.length + 1)

    def rows(self, c: int, buffer: Buffer) -> np.ndarray:
        """A buffer as uint8[rows, bytes]: a row per token's entry, or per state."""
        data = self.stack.device[c].buffers[buffer.layer, buffer.name].numpy()
        return data.reshape(-1).view(np.uint8).reshape(-1, buffer.entry_bytes)

    def row_of(self, lease: Lease, c: int, at: int) -> int:
        if isinstance(self.spec.components[c].reach, Point):
            read = lease.states(c).read
            assert read is not None
            return read
        table = lease.pages(c)
        return int(table.slots[at // PAGE - table.first_page]) * PAGE + at % PAGE

    def close(self) -> None:
        self.core.close()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(preset: str, **model: object) -> Bench:
        made.append(Bench(preset, **model))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_flipped_byte_is_caught_by_the_next_forward(
    preset: str, bench: Callable[..., Bench]
) -> None:
    rig, tokens = bench(preset), prompt("flip", 150)
    lease = rig.acquire(tokens)
    for stop in (64, 128, 144):
        rig.run(lease, tokens, stop)
    seq = rig.ready(lease, tokens)
    rig.oracle.forward([seq])
    source = random.Random(preset)
    for c, component in enumerate(rig.spec.components):
        for buffer in component.buffers:
            low = {Full(): 0, Point(): 143}.get(component.reach, 144 - (WINDOW - 1))
            for at in (low, source.randrange(low, 144), 143):
                rows, row = rig.rows(c, buffer), rig.row_of(lease, c, at)
                byte = source.randrange(buffer.entry_bytes)
                rows[row, byte] ^= 1 << source.randrange(8)
                with pytest.raises(WrongBytes) as caught:
                    rig.oracle.forward([seq])
                error = caught.value
                assert (error.layer, error.buffer, error.rank) == (buffer.layer, buffer.name, 0)
                assert error.position == (144 if isinstance(component.reach, Point) else at)
                rows[row] = np.frombuffer(
                    slow_entry(tokens[: error.position + component.reach.page_shaped], buffer),
                    np.uint8,
                )
                rig.oracle.forward([seq])
    assert rig.oracle.wrong and "wrong bytes for position" in rig.oracle.first_wrong


@pytest.mark.parametrize("preset", PRESETS)
def test_a_flipped_byte_is_caught_in_a_batch(preset: str, bench: Callable[..., Bench]) -> None:
    rig = bench(preset)
    lists = [prompt(f"batch{i}", 100) for i in range(3)]
    leases = [rig.acquire(tokens) for tokens in lists]
    for i, (lease, tokens) in enumerate(zip(leases, lists, strict=True)):
        rig.run(lease, tokens, (3 + i) * PAGE)
    seqs = [rig.ready(lease, tokens) for lease, tokens in zip(leases, lists, strict=True)]
    hashes = rig.oracle.forward(seqs)
    assert hashes.tolist() == [slow_hash(t[: s.stop]) for t, s in zip(lists, seqs, strict=True)]
    for c, component in enumerate(rig.spec.components):
        for buffer in component.buffers:
            rows, row = rig.rows(c, buffer), rig.row_of(leases[1], c, 50)
            rows[row, -1] ^= 0x80
            with pytest.raises(WrongBytes, match=f"buffer {buffer.name}.*sequence at 64 tokens"):
                rig.oracle.forward(seqs)
            rows[row, -1] ^= 0x80
    rig.oracle.forward(seqs)


@pytest.mark.parametrize("preset", ["full+window", "full+window+state"])
def test_window_pages_outside_the_reach_are_not_read(
    preset: str, bench: Callable[..., Bench]
) -> None:
    rig, tokens = bench(preset), prompt("window", 200)
    lease = rig.acquire(tokens)
    rig.run(lease, tokens, 64)
    rig.run(lease, tokens, 128, commit=False)
    seq = rig.ready(lease, tokens)
    c = next(i for i, x in enumerate(rig.spec.components) if isinstance(x.reach, Window))
    buffer = rig.spec.components[c].buffers[0]
    first = lease.pages(c).first_page * PAGE
    outside = 128 - WINDOW
    assert first <= outside, "the table must still have what is not to be read"
    rig.rows(c, buffer)[rig.row_of(lease, c, outside)] ^= 0xFF
    rig.oracle.forward([seq])
    rig.rows(c, buffer)[rig.row_of(lease, c, outside + 1)] ^= 0xFF
    with pytest.raises(WrongBytes, match=f"position {outside + 1} "):
        rig.oracle.forward([seq])


@pytest.mark.parametrize("preset", ["full+state", "full+window+state"])
def test_a_state_one_page_earlier_is_caught(preset: str, bench: Callable[..., Bench]) -> None:
    rig, tokens = bench(preset), prompt("state", 100)
    c = len(rig.spec.components) - 1
    lease = rig.acquire(tokens)
    rig.run(lease, tokens, 3 * PAGE)
    earlier = lease.states(c).read
    rig.run(lease, tokens, 4 * PAGE)
    seq = rig.ready(lease, tokens)
    rig.oracle.forward([seq])
    assert earlier is not None and earlier != lease.states(c).read
    lease.states(c).read = earlier
    with pytest.raises(WrongBytes, match=f"position {4 * PAGE} in slot {earlier}"):
        rig.oracle.forward([seq])


@pytest.mark.parametrize("preset", PRESETS)
def test_swapped_slots_of_two_prompts_are_caught(preset: str, bench: Callable[..., Bench]) -> None:
    rig = bench(preset)
    ours, theirs = prompt("ours", 100), prompt("theirs", 100)
    mine, other = rig.acquire(ours), rig.acquire(theirs)
    rig.run(mine, ours, 64, commit=False)
    rig.run(other, theirs, 64, commit=False)
    seq = rig.ready(mine, ours)
    for c, component in enumerate(rig.spec.components):
        if not component.reach.page_shaped:
            continue
        own = [lease.pages(c) for lease in (mine, other)]
        one, two = (np.array([t.slots[3 - t.first_page]], np.int32) for t in own)
        mine.pages(c).replace(3, two)
        with pytest.raises(WrongBytes, match=f"layer {component.buffers[0].layer}.*position 48 "):
            rig.oracle.forward([seq])
        mine.pages(c).replace(3, one)
    rig.oracle.forward([seq])


def test_the_bytes_of_another_rank_are_wrong_bytes(bench: Callable[..., Bench]) -> None:
    rig, tokens = bench("full+indexer", rank=1), prompt("rank", 60)
    lease = rig.acquire(tokens)
    rig.run(lease, tokens, 48)
    seq = rig.ready(lease, tokens)
    with pytest.raises(WrongBytes, match="rank 0, layer 0, buffer k"):
        OracleModel(rig.stack, rank=0).forward([seq])
    with pytest.raises(RankError, match="rank 2, layer 0, buffer k"):
        OracleModel(rig.stack, rank=2, ranks=3).forward([seq])
    for buffer in rig.spec.components[0].buffers:
        found = rig.rows(0, buffer)[rig.row_of(lease, 0, 20)].tobytes()
        assert found == slow_entry(tokens[:21], buffer, 0 if buffer.replicated else 1)
    assert any(buffer.replicated for buffer in rig.spec.components[0].buffers)


# ---- tickets, borrowed pages ---------------------------------------------------------------------


class LateTicket:
    """Puts a layer's bytes in place only when that layer is waited for."""

    def __init__(self, rig: Bench, lease: Lease) -> None:
        self.waited: list[int] = []
        self.failed = False
        self._late = {}
        for buffer in rig.spec.components[0].buffers:
            rows, row = rig.rows(0, buffer), rig.row_of(lease, 0, 5)
            self._late[buffer.layer, buffer.name] = (rows, row, rows[row].copy())
            rows[row] ^= 0xFF

    def wait_layer(self, layer: int) -> None:
        self.waited.append(layer)
        for (owner, _), (rows, row, right) in self._late.items():
            if owner == layer:
                rows[row] = right


def test_each_layer_is_waited_for_before_it_is_read(bench: Callable[..., Bench]) -> None:
    rig, tokens = bench("full"), prompt("ticket", 60)
    lease = rig.acquire(tokens)
    rig.run(lease, tokens, 48)
    seq = rig.ready(lease, tokens)
    ticket = LateTicket(rig, lease)
    with pytest.raises(WrongBytes):
        rig.oracle.forward([seq])
    late = SeqInput(seq.tokens, seq.start, seq.tables, ticket, seq.present, tokens)
    rig.oracle.forward([late])
    assert ticket.waited == [0, 1]


def test_a_failed_load_back_is_raised_or_kept_for_the_ranks(bench: Callable[..., Bench]) -> None:
    class Broken:
        failed = True

        def wait_layer(self, layer: int) -> None:
            if not self.failed:
                raise CopyError("gone")

    rig, tokens = bench("full+state"), prompt("failed", 60)
    lease = rig.acquire(tokens)
    rig.run(lease, tokens, 48)
    seq = rig.ready(lease, tokens)
    for buffer in rig.spec.components[0].buffers:
        rig.rows(0, buffer)[rig.row_of(lease, 0, 5)] ^= 0xFF
    ticket = Broken()
    late = SeqInput(seq.tokens, seq.start, seq.tables, ticket, seq.present, tokens)
    rig.oracle.forward([late])
    assert rig.oracle.wrong == 0
    ticket.failed = False
    with pytest.raises(CopyError):
        rig.oracle.forward([late])


def test_present_tokens_are_read_and_not_written(bench: Callable[..., Bench]) -> None:
    rig, tokens = bench("full+state"), prompt("present", 100)
    first = rig.acquire(tokens)
    rig.run(first, tokens, 64)
    second = rig.acquire(prompt("elsewhere", 100))
    rig.cache.allocate(second, 80)
    second.pages(0).replace(0, first.pages(0).slots[:4].copy())
    seq = SeqInput(tokens[:80], 0, second.tables, None, 64, tokens)
    buffer = rig.spec.components[0].buffers[0]
    for at in (0, 40, 63):
        rows, row = rig.rows(0, buffer), rig.row_of(first, 0, at)
        rows[row] ^= 0xFF
        with pytest.raises(WrongBytes, match=f"position {at} "):
            rig.oracle.forward([seq])
        rows[row] ^= 0xFF
    rig.oracle.forward([seq])
    wrote = rig.rows(0, buffer)[rig.row_of(second, 0, 70)].tobytes()
    assert wrote == slow_entry(tokens[:71], buffer)


# ---- the model's other duties --------------------------------------------------------------------


def test_what_no_table_covers_and_what_no_history_tells_is_refused(
    bench: Callable[..., Bench],
) -> None:
    rig, tokens = bench("full+state"), prompt("refused", 60)
    lease = rig.acquire(tokens)
    rig.cache.allocate(lease, 32)
    with pytest.raises(LeaseError, match="the forward needs"):
        rig.oracle.forward([SeqInput(tokens[:40], 0, lease.tables, history=tokens)])
    with pytest.raises(ValueError, match="does not go on"):
        rig.oracle.forward([SeqInput(tokens[:16], 0, lease.tables)])
    with pytest.raises(ValueError, match="several with one"):
        rig.oracle.forward([SeqInput(tokens[:16], 0, lease.tables, history=tokens)] * 2)
    with pytest.raises(ConfigError, match="full\\+state"):
        oracle_spec("full+stat", PAGE)


def test_an_emulated_forward_takes_its_time(bench: Callable[..., Bench]) -> None:
    slept: list[float] = []
    rig = bench("full", emulation=Emulation(1e-3, 7e-2), sleep=slept.append)
    tokens = prompt("slow", 60)
    lease = rig.acquire(tokens)
    rig.run(lease, tokens, 48)
    rig.oracle.forward([rig.ready(lease, tokens)])
    assert slept == [pytest.approx(4.8e-2), 7e-2]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_engine_gives_the_oracles_answer_and_names_what_is_wrong(
    preset: str, bench: Callable[..., Bench]
) -> None:
    rig = bench(preset)
    core, tokens = rig.core, prompt("engine", 100)
    for name in ("cold", "warm"):
        sampling = Sampling(max_tokens=9)
        core.submit(GenerateRequest(request_id=name, prompt=tokens, sampling=sampling))
        got: list[int] = []
        while core.has_work:
            got += [token for output in core.step() for token in output.tokens]
            core.check()
        assert got == answer(tokens, 9)
    assert core.stats()["engine"]["prompt_tokens"]["device"] == 96
    buffer = rig.spec.components[0].buffers[0]
    rig.rows(0, buffer)[:] ^= 0xFF
    core.submit(GenerateRequest(request_id="wrong", prompt=tokens, sampling=Sampling(max_tokens=9)))
    last = None
    while core.has_work:
        last = [last, *core.step()][-1]
    assert last is not None and last.finish_reason == "error"
    assert last.error is not None and "layer 0, buffer k: wrong bytes" in last.error
    assert core.own_stats()["wrong"] == 1
