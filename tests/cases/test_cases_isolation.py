"""Cases C109 to C116: namespaces and hashing."""

from __future__ import annotations

import hashlib
from itertools import combinations

from banyan.tree import Tree, encode_namespace, encode_tokens
from tests.cases.scene import A, end
from tests.support.rig import Rig
from tests.tree.plant import Plant


def space(adapter: str | None, salt: str | None) -> bytes:
    """A namespace of what is given."""
    named = (("adapter", adapter), ("salt", salt))
    return encode_namespace([(name, value) for name, value in named if value is not None])


def share(one: bytes, other: bytes) -> bool:
    """Whether what is cached under one namespace is found under the other."""
    plant = Plant("full+window+state")
    plant.insert(A[0:16], states=[16], namespace=one)
    assert plant.match(A[0:16], one).boundary == 16
    return plant.match(A[0:16], other).full_len > 0


def test_c109_parts_do_not_run_together() -> None:
    assert not share(space("bc", "a"), space("c", "ab"))
    assert not share(space("", None), space(None, None))
    assert not share(space(None, ""), space("", None))
    assert not share(space("a", "b"), space("ab", ""))
    assert not share(encode_namespace([("a", "b"), ("c", "d")]), encode_namespace([("a", "bcd")]))


def test_c110_an_adapter_is_not_a_salt() -> None:
    values = (None, "", "x", "0", "None", "salt")
    spaces = [space(adapter, salt) for adapter in values for salt in values]
    for one, other in combinations(spaces, 2):
        assert one != other
    assert not share(space("x", None), space(None, "x"))
    assert not share(space("x", None), space("x", "x"))


def test_c110_the_window_and_the_state_are_kept_apart_too() -> None:
    rig = Rig("full+window+state")
    rig.run(A[0:17], namespace="x")
    rig.evict_device()
    other = rig.run(A[0:17], namespace="y")
    assert other.boundary == 0
    assert rig.run(A[0:17], namespace="x").host_len == 16
    end(rig)


def test_c112_pictures_with_equal_placeholders_are_told_apart_by_their_digest() -> None:
    """What a prompt contains beside its tokens goes into the namespace, as a digest."""
    plant = Plant()
    tree: Tree = plant.tree
    key = encode_tokens([7] * 9)

    def picture(number: int) -> bytes:
        return encode_namespace([("image", hashlib.sha256(str(number).encode()).hexdigest())])

    for number in range(5_000):
        plant.insert([7] * 8, namespace=picture(number))
    assert all(tree.match(key, picture(n)).full_len == 8 for n in range(5_000))
    assert not any(tree.match(key, picture(n)).full_len for n in range(5_000, 70_000))
    assert tree.match(key).full_len == 0


def test_c116_keys_do_not_depend_on_the_process() -> None:
    """Keys are the tokens themselves; `tests/test_determinism.py` compares whole runs."""
    assert encode_tokens([1, 2]).hex() == "0100000002000000"
    assert space("b", "a").hex() == (
        "07000000" + b"adapter".hex() + "01000000" + b"b".hex()
        + "04000000" + b"salt".hex() + "01000000" + b"a".hex()
    )  # fmt: skip
