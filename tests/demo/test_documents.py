"""The demo's documents and questions, and the corpus of the benchmarks."""

from __future__ import annotations

import pytest

from kvloom.demo.documents import (
    DOCUMENTS,
    QUESTIONS,
    Question,
    corpus_tokens,
    documents_for,
    pick_questions,
)


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [self.known.setdefault(word, len(self.known)) for word in text.split()]


def test_there_are_eight_documents_of_a_page_each() -> None:
    assert len(DOCUMENTS) == 8
    for text in DOCUMENTS.values():
        assert 450 < len(text.split()) < 600
        assert text == text.strip()


def test_every_document_has_two_questions() -> None:
    assert sorted(q.document for q in QUESTIONS) == sorted([*DOCUMENTS, *DOCUMENTS])
    assert len({q.text for q in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text)
def test_the_answer_stands_in_its_document_and_in_no_other(question: Question) -> None:
    holding = [name for name, text in DOCUMENTS.items() if question.answered_by(text)]
    assert holding == [question.document]
    assert not question.answered_by(question.text), "else repeating the question were an answer"


def test_the_demo_has_questions_that_the_model_can_answer() -> None:
    assert len({q.document for q in QUESTIONS if q.answered}) >= 6


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text)
def test_the_answering_document_stands_next_to_the_question(question: Question) -> None:
    for count in (1, 6, 8):
        order = documents_for(question, count)
        assert len(set(order)) == count
        assert set(order) <= DOCUMENTS.keys()
        assert order[-1] == question.document
    assert documents_for(question) == documents_for(question)


def test_documents_stand_elsewhere_for_questions_on_another_one() -> None:
    first = {documents_for(q, 8)[0] for q in QUESTIONS}
    assert len(first) > 3
    assert len({tuple(documents_for(q, 8)) for q in QUESTIONS}) == len(DOCUMENTS)


@pytest.mark.parametrize("seed", range(5))
def test_answerable_questions_come_first_on_as_many_documents_as_there_are(seed: int) -> None:
    answerable = {q.document for q in QUESTIONS if q.answered}
    picked = pick_questions(len(answerable), seed)
    assert {q.document for q in picked} == answerable
    assert all(q.answered for q in picked)
    assert picked == pick_questions(len(answerable), seed)
    assert set(pick_questions(len(QUESTIONS), seed)) == set(QUESTIONS)


def test_seeds_pick_differently() -> None:
    assert len({tuple(pick_questions(3, seed)) for seed in range(5)}) > 1


def test_more_questions_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="17"):
        pick_questions(17)


def test_the_corpus_is_long_varied_and_always_the_same() -> None:
    words = Words()
    tokens = corpus_tokens(words, 25_000)
    assert len(tokens) >= 25_000
    assert len(set(tokens[:25_000])) > 3_000
    assert list(corpus_tokens(words, 25_000)) == list(tokens)


def test_a_longer_corpus_than_there_is_is_an_error() -> None:
    with pytest.raises(ValueError, match="100000000"):
        corpus_tokens(Words(), 100_000_000)
