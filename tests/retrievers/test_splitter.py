"""Passages: no longer than asked, cut at sentences, and together the whole document."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.diskann.splitter import PassageSplitter
from stream2llm_sdk.retrievers.embedding import wordllama_folder

TOKENIZER_FILE = wordllama_folder() / "tokenizers" / "l2_supercat_tokenizer_config.json"
TOKENIZER = Tokenizer.from_file(str(TOKENIZER_FILE))
SPLITTER = PassageSplitter(48)

SENTENCES = [f"This is sentence number {row} of the text, and it says something of its own." for row in range(300)]


def tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


def split(text: str, splitter: PassageSplitter = SPLITTER) -> list[Chunk]:
    (passages,) = splitter.split([Chunk(text, source="s", title="t", metadata={"dump": "d"})])
    return passages


def test_passages_are_whole_sentences_and_keep_what_the_document_said_of_itself() -> None:
    passages = split(" ".join(SENTENCES))
    assert [sentence for p in passages for sentence in re.split(r"(?<=\.) ", p.text)] == SENTENCES
    assert all(tokens(passage.text) <= 48 for passage in passages)
    assert {(passage.source, passage.title, passage.metadata["dump"]) for passage in passages} == {("s", "t", "d")}
    assert [passage.metadata["passage"] for passage in passages] == list(range(len(passages)))


def test_a_document_that_fits_stays_whole() -> None:
    assert [passage.text for passage in split("One sentence. Another.\n\nA paragraph.")] == [
        "One sentence. Another.\n\nA paragraph."
    ]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=3_000), st.sampled_from([PassageSplitter(8), PassageSplitter(21), SPLITTER]))
def test_nothing_but_white_space_is_lost(text: str, splitter: PassageSplitter) -> None:
    passages = split(text, splitter)
    clean = text.encode("utf-8", "replace").decode()
    for passage in passages:
        start = passage.metadata["start"]
        assert clean[start : start + len(passage.text)] == passage.text
    ends = [0, *(p.metadata["start"] + len(p.text) for p in passages)]
    starts = [*(p.metadata["start"] for p in passages), len(clean)]
    assert all(not clean[end:start].strip() for end, start in zip(ends, starts, strict=True))


@pytest.mark.parametrize(
    "text",
    ["x" * 40_000, "word " * 8_000, "日本語テキスト。" * 5_000, "\n".join(SENTENCES * 2), "aGVsbG8+" * 5_000],
    ids=["one word", "no sentence", "no space", "lines", "base64"],
)
def test_huge_documents_take_time_in_proportion(text: str) -> None:
    passages = split(text, PassageSplitter(256))
    assert all(tokens(passage.text) <= 257 for passage in passages)
    squeezed = "".join("".join(passage.text for passage in passages).split())
    assert squeezed == "".join(text.split())


def test_passages_overlap_when_asked() -> None:
    passages = split(" ".join(SENTENCES[:150]), PassageSplitter(64, overlap_tokens=24))
    spans = [(p.metadata["start"], p.metadata["start"] + len(p.text)) for p in passages]
    assert all(later[0] < earlier[1] for earlier, later in pairwise(spans))


def test_several_documents_keep_their_passages_apart() -> None:
    documents = [Chunk("one"), Chunk("lone \ud800 surrogate"), Chunk("  \n "), Chunk(" ".join(SENTENCES[:20]))]
    found = SPLITTER.split(documents)
    assert [len(passages) > 0 for passages in found] == [True, True, False, True]
    assert found[1][0].text == "lone ? surrogate"


def test_another_tokenizer_is_loaded_by_file_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(TOKENIZER_FILE.read_bytes())
    text = " ".join(SENTENCES)
    for name in (str(folder), str(folder / "tokenizer.json")):
        assert split(text, PassageSplitter(48, tokenizer=name)) == split(text)
    with pytest.raises(ConfigurationError, match=r"tokenizer='.*/nothing'.*cannot be loaded"):
        split(text, PassageSplitter(48, tokenizer=str(tmp_path / "nothing")))


@pytest.mark.parametrize("arguments", [{"max_tokens": 7}, {"max_tokens": 2.5}, {"overlap_tokens": 129}])
def test_numbers_out_of_range_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        PassageSplitter(**arguments)
