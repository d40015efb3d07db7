"""Banyan's tree beside those of others: one interface, the same workloads, one run.

Nothing here is imported by `banyan`.
"""
