"""The radix tree: keys, nodes, matching, locks, eviction, and the check of all of it."""

from banyan.tree.growth import Inserted, Offer
from banyan.tree.keys import ROOT_NAMESPACE, decode_tokens, encode_namespace, encode_tokens
from banyan.tree.match import Match
from banyan.tree.node import Mark, Node, Tier
from banyan.tree.policies import POLICIES, Policy, make_policy
from banyan.tree.tree import Tree

__all__ = [
    "POLICIES",
    "ROOT_NAMESPACE",
    "Inserted",
    "Mark",
    "Match",
    "Node",
    "Offer",
    "Policy",
    "Tier",
    "Tree",
    "decode_tokens",
    "encode_namespace",
    "encode_tokens",
    "make_policy",
]
