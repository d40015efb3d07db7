"""Every error Banyan raises on purpose, in one place.

Each carries the facts as fields and says what to do in its message. A failure of a lower tier is
not here: it is a typed miss with a counter, and the request recomputes.
"""

from __future__ import annotations


class BanyanError(Exception):
    """Base of all errors raised on purpose."""


class SpecError(BanyanError):
    """A model configuration that a `CacheSpec` cannot represent."""


class ConfigError(BanyanError):
    """A bad or contradictory option, found at start.

    Args:
        option: the option as the user writes it, such as `--page-size`.
        problem: what is wrong with the value given.
        fix: what to write instead.
    """

    def __init__(self, option: str, problem: str, fix: str) -> None:
        self.option, self.problem, self.fix = option, problem, fix
        super().__init__(f"{option}: {problem}. {fix}")


class RequestError(BanyanError):
    """A request that can never be served as asked; maps to HTTP 400.

    Args:
        param: the name of the offending field, or None.
        code: a short machine-readable reason such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request"):
        self.param, self.code = param, code
        super().__init__(message)


class PoolError(BanyanError):
    """A slot was used against the rules of its pool (double free, foreign slot)."""


class LeaseError(BanyanError):
    """A lease was used after its release, or for another cache."""


class InvariantError(BanyanError):
    """`check()` found the structure inconsistent; lists every finding."""

    def __init__(self, findings: list[str]) -> None:
        self.findings = findings
        super().__init__(f"{len(findings)} finding(s):\n  " + "\n  ".join(findings))


class CopyError(BanyanError):
    """A load-back failed while a request was already running on it; the request recomputes."""


class RankError(BanyanError):
    """The ranks of a tensor-parallel engine have drifted apart, or one of them is gone.

    None of them can go on: what they hold is no longer known to be equal.
    """


class RankLostError(RankError):
    """Another rank does not answer."""
