"""The demo's documents are real text of an exact length, and every question is asked about each."""

from __future__ import annotations

import pytest

from banyan.bench.documents import DocumentQuestions, python_documents
from banyan.engine.presets import build_tokenizer
from banyan.errors import ConfigError


def test_documents_are_the_beginnings_of_real_topics() -> None:
    from pydoc_data.topics import topics

    tokenizer = build_tokenizer()
    found = python_documents(5, 700, tokenizer.encode, tokenizer.decode)
    assert len({document.title for document in found}) == 5
    for document in found:
        assert len(document.tokens) == 700
        assert topics[document.title].startswith(document.text[:600])


def test_more_documents_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="topics have 100000 tokens"):
        python_documents(50, 100_000, list, str)


def test_every_question_is_asked_about_every_document_in_each_round() -> None:
    work = DocumentQuestions(
        documents=((1, 2, 3), (4, 5, 6)), questions=((7,), (8, 9), (10,)), output=2, rounds=3
    )
    rounds = list(work.play())
    wanted = {(*d, *q) for d in work.documents for q in work.questions}
    assert [len(prompts) for prompts in rounds] == [6, 6, 6]
    for prompts in rounds:
        assert {tuple(p.tokens) for p in prompts} == wanted
        assert {p.index for p in prompts} == set(range(6))
        assert {(p.group, tuple(p.tokens[:3])) for p in prompts} == {(0, (1, 2, 3)), (1, (4, 5, 6))}
    assert len({tuple(p.index for p in prompts) for prompts in rounds}) > 1
    assert work.document_tokens == 3 + (1 + 2) + (2 + 2) + (1 + 2)
