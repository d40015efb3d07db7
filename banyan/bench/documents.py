"""Real text that every Python has: its language reference, as documents with questions.

Owns the demo's workload. The topics come from `pydoc_data`, in the order of their length, so the
same Python version gives the same documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from banyan.bench.work import Play, Prompt, TokenSource
from banyan.errors import ConfigError

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]

QUESTIONS = (
    "Summarize the text above in one sentence.",
    "Which terms does the text above define?",
    "Give an example of what the text above describes.",
    "What does the text above say about errors?",
)


class Document(NamedTuple):
    """One topic's beginning, cut to an exact number of tokens."""

    title: str
    text: str
    tokens: list[int]


def python_documents(count: int, tokens: int, encode: Encode, decode: Decode) -> list[Document]:
    """The `count` longest topics of the language reference, each cut to its first `tokens` tokens.

    Raises:
        ConfigError: there are not so many topics of that length.
    """
    from pydoc_data.topics import topics

    documents: list[Document] = []
    for title, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(documents) == count:
            break
        cut = encode(text)[:tokens]
        if len(cut) == tokens:
            documents.append(Document(title, decode(cut), cut))
    if len(documents) < count:
        problem = f"only {len(documents)} topics have {tokens} tokens"
        raise ConfigError("documents", problem, "Ask for fewer or shorter documents")
    return documents


@dataclass(frozen=True, slots=True)
class DocumentQuestions:
    """Every question about every document, in a new order each round.

    Args:
        documents, questions: token ids; a prompt is a document followed by a question.
        output: tokens to answer, exactly.
    """

    documents: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]
    output: int = 16
    rounds: int = 3
    seed: int = 0

    @property
    def requests(self) -> int:
        """Requests per round."""
        return len(self.documents) * len(self.questions)

    @property
    def document_tokens(self) -> int:
        """Tokens that the longest document and its answered questions leave in the cache."""
        asked = sum(len(question) + self.output for question in self.questions)
        return max(map(len, self.documents)) + asked

    def play(self, source: TokenSource | None = None) -> Play:
        """Yield each round's prompts; neither the source nor the answers are used."""
        prompts = [
            Prompt(group * len(self.questions) + i, group, [*document, *question])
            for group, document in enumerate(self.documents)
            for i, question in enumerate(self.questions)
        ]
        for turn in range(self.rounds):
            order = list(prompts)
            random.Random(f"{self.seed}/order/{turn}").shuffle(order)
            yield order
