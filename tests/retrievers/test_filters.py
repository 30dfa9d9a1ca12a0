"""Metadata filters: what they mean, and that a filtered search finds what a filtered scan finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from vectors import TextAsRow, closest, clustered

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.diskann.build import build_index
from stream2llm_sdk.retrievers.diskann.columns import CodedColumn, MetadataColumns, NumberColumn
from stream2llm_sdk.retrievers.diskann.filters import AllowedNodes, MetadataFilter
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
from stream2llm_sdk.retrievers.diskann.search import EmissionGate, SearchOptions, SearchStatus

pytestmark = pytest.mark.slow

ROWS: list[dict[str, Any]] = [
    {"source": "a", "stars": 3, "free": True, "mixed": 1},
    {"source": "b", "stars": 4.5, "free": False, "mixed": "1"},
    {"source": "a", "free": True, "mixed": True},
    {"stars": -1, "mixed": 1.0},
    {"source": "c", "stars": 3},
]


def columns() -> MetadataColumns:
    def coded(name: str) -> CodedColumn:
        values = list({(type(row[name]), row[name]): None for row in ROWS if name in row})
        codes = [values.index((type(row[name]), row[name])) if name in row else -1 for row in ROWS]
        return CodedColumn(name, np.array(codes, np.int32), tuple(value for _, value in values))

    stars = NumberColumn("stars", np.array([row.get("stars", np.nan) for row in ROWS]))
    return MetadataColumns([coded("source"), coded("free"), coded("mixed"), stars])


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({"source": "a"}, [0, 2]),
        ({"source": {"$eq": "a"}, "stars": 3}, [0]),
        ({"source": {"$ne": "a"}}, [1, 3, 4]),
        ({"source": {"$in": ["b", "c", "z"]}}, [1, 4]),
        ({"source": {"$in": []}}, []),
        ({"source": {"$nin": ["a", "b"]}}, [3, 4]),
        ({"source": {"$exists": True}}, [0, 1, 2, 4]),
        ({"source": {"$exists": False}}, [3]),
        ({"source": {"$gt": "a"}}, [1, 4]),
        ({"stars": {"$gte": 3}}, [0, 1, 4]),
        ({"stars": {"$gt": 3}}, [1]),
        ({"stars": {"$lt": 0}}, [3]),
        ({"stars": {"$gte": 3, "$lt": 4}}, [0, 4]),
        ({"stars": {"$lte": 4.5}}, [0, 1, 3, 4]),
        ({"stars": {"$ne": 3}}, [1, 2, 3]),
        ({"stars": {"$in": [3, -1, "3"]}}, [0, 3, 4]),
        ({"stars": {"$nin": [3]}}, [1, 2, 3]),
        ({"stars": {"$exists": False}}, [2]),
        ({"free": True}, [0, 2]),
        ({"free": {"$ne": True}}, [1, 3, 4]),
        ({"mixed": 1}, [0, 3]),
        ({"mixed": "1"}, [1]),
        ({"mixed": True}, [2]),
        ({"$or": [{"source": "b"}, {"stars": {"$lt": 0}}]}, [1, 3]),
        ({"$and": [{"source": "a"}, {"stars": {"$exists": False}}]}, [2]),
        ({"$not": {"source": "a"}}, [1, 3, 4]),
        ({"free": True, "$or": [{"stars": 3}, {"mixed": "1"}]}, [0]),
        ({"$not": {"$or": [{"source": "a"}, {"source": "b"}]}}, [3, 4]),
    ],
)
def test_columns_and_metadata_say_the_same(filter: dict[str, Any], expected: list[int]) -> None:
    checked = MetadataFilter(filter)
    assert np.flatnonzero(checked.mask(columns())).tolist() == expected
    assert [row for row, metadata in enumerate(ROWS) if checked.holds(metadata)] == expected


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ({}, "give a mapping"),
        ([], "give a mapping"),
        ("source", "give a mapping"),
        ({"source": {}}, "without a condition"),
        ({"source": {"$regex": "a"}}, r"operator '\$regex'; choose"),
        ({"source": {"eq": "a"}}, "operator 'eq'"),
        ({"source": None}, "not None"),
        ({"source": ["a"]}, "not \\['a'\\]"),
        ({"source": {"$in": "abc"}}, r"\$in takes a list"),
        ({"source": {"$in": 5}}, r"\$in takes a list"),
        ({"source": {"$in": [["a"]]}}, "takes text"),
        ({"stars": {"$gt": float("nan")}}, "nan"),
        ({"stars": {"$exists": 1}}, r"\$exists takes True or False"),
        ({"$or": {"source": "a"}}, r"\$or takes a list"),
        ({"$or": []}, r"\$or takes a list"),
        ({"$nor": [{"source": "a"}]}, r"'\$nor' is no field"),
        ({5: "a"}, "5 is no field"),
        ({"stars": 10**400}, "'stars': .eq takes numbers up to 1.8e\\+308"),
        ({"stars": {"$gt": -(10**5000)}}, "takes numbers up to"),
        ({"stars": {"$in": np.array(3)}}, r"\$in takes a list"),
    ],
)
def test_a_filter_that_is_written_wrong_is_a_clear_error(filter: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MetadataFilter(filter)


def one_time(*values: object) -> dict[str, Any]:
    return {"source": {"$in": iter(values)}}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (one_time("a"), one_time("b"), False),
        (one_time("a", "b"), {"source": {"$in": ("a", "b")}}, True),
        (MappingProxyType({"source": "a"}), MappingProxyType({"source": "b"}), False),
        ({"stars": MappingProxyType({"$gt": 3})}, {"stars": MappingProxyType({"$gt": 5})}, False),
        ({"stars": MappingProxyType({"$gt": 3})}, {"stars": {"$gt": 3}}, True),
        ({"$or": [MappingProxyType({"stars": 3})]}, {"$or": [MappingProxyType({"stars": -1})]}, False),
        ({"mixed": 1}, {"mixed": True}, False),
        ({"mixed": 1}, {"mixed": "1"}, False),
        ({"source": "a", "stars": 3}, {"stars": 3, "source": "a"}, True),
    ],
)
def test_filters_have_one_key_when_they_mean_the_same(one: Any, other: Any, same: bool) -> None:
    first, second = MetadataFilter(one), MetadataFilter(other)
    assert (first.key == second.key) is same
    assert (first.mask(columns()).tolist() == second.mask(columns()).tolist()) is same


def test_a_filter_that_is_changed_afterwards_stays_as_it_was() -> None:
    wanted = ["a"]
    checked = MetadataFilter({"source": {"$in": wanted}})
    wanted.append("b")
    assert np.flatnonzero(checked.mask(columns())).tolist() == [0, 2]


def test_a_filter_that_is_nested_too_deep_is_refused() -> None:
    filter: dict[str, Any] = {"source": "a"}
    for _ in range(100):
        filter = {"$not": filter}
    with pytest.raises(ConfigurationError, match="more than 32 deep"):
        MetadataFilter(filter)


def test_a_column_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="no column 'colour'; its columns are: free, mixed, source, stars"):
        MetadataFilter({"colour": "red"}).mask(columns())


@pytest.mark.parametrize("num_nodes", [1, 7, 8, 9, 1000])
def test_allowed_nodes_are_those_of_the_mask(num_nodes: int) -> None:
    mask = np.random.default_rng(num_nodes).random(num_nodes) < 0.3
    allowed = AllowedNodes(mask)
    assert allowed.nodes.tolist() == np.flatnonzero(mask).tolist()
    assert len(allowed) == int(mask.sum())


NUM_DOCUMENTS, DIM, CLUSTERS = 6_000, 32, 60
VECTORS = clustered(NUM_DOCUMENTS, DIM, num_clusters=CLUSTERS, seed=3)
QUERIES = clustered(NUM_DOCUMENTS + 50, DIM, num_clusters=CLUSTERS, seed=3)[NUM_DOCUMENTS:]
SIX = (5, 1_000, 2_000, 3_000, 4_000, 5_000)
CLUSTER_OF = np.argmax(VECTORS @ VECTORS[:40].T, axis=1)

# Documents that pass, by filter: half, 5 %, 0.1 %, and a region of the space far from most queries.
FILTERS: dict[str, tuple[dict[str, Any], Callable[[int], bool]]] = {
    "50 %": ({"number": {"$lt": NUM_DOCUMENTS // 2}}, lambda row: row < NUM_DOCUMENTS // 2),
    "5 %": ({"group": "g7"}, lambda row: row % 20 == 7),
    "0.1 %": ({"number": {"$in": list(SIX)}}, lambda row: row in SIX),
    "one region": ({"cluster": {"$in": [0, 1, 2]}}, lambda row: int(CLUSTER_OF[row]) in (0, 1, 2)),
    "none": ({"group": "nobody"}, lambda row: False),
}  # fmt: skip


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskANNIndex]:
    documents = (
        {"text": str(row), "number": row, "group": f"g{row % 20}", "cluster": int(CLUSTER_OF[row])}
        for row in range(NUM_DOCUMENTS)
    )
    directory: Path = tmp_path_factory.mktemp("filtered") / "index"
    embedder = TextAsRow(VECTORS, QUERIES)
    with build_index(documents, directory, embedder=embedder, filterable=("number", "group", "cluster")) as opened:
        yield opened


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("k", "list_size"), [(10, 60), (40, 120)])
def test_a_filtered_search_finds_what_a_scan_finds(index: DiskANNIndex, name: str, k: int, list_size: int) -> None:
    filter, passes = FILTERS[name]
    rows = [row for row in range(NUM_DOCUMENTS) if passes(row)]
    options = SearchOptions(k=k, search_list_size=list_size)
    hits = wanted = 0
    for number, query in enumerate(QUERIES):
        found = [int(chunk.text) for chunk in index.search(f"q{number}", options, filter)]
        expected = closest("cosine", VECTORS, query, k, rows)
        assert set(found) <= set(rows)
        assert len(found) == len(expected)
        hits += len(set(found) & set(expected))
        wanted += len(expected)
    assert hits >= 0.95 * wanted


def test_few_allowed_documents_are_all_read_and_nothing_else(index: DiskANNIndex) -> None:
    search = index.begin_search("q0", SearchOptions(k=3, search_list_size=30), FILTERS["0.1 %"][0])
    while search.run() is not SearchStatus.FINISHED:
        pass
    assert search.num_expansions == 6
    assert set(search.pool.nodes) <= set(SIX)


def test_many_allowed_documents_are_not_all_read(index: DiskANNIndex) -> None:
    search = index.begin_search("q0", SearchOptions(k=5, search_list_size=60), FILTERS["50 %"][0])
    while search.run() is not SearchStatus.FINISHED:
        pass
    assert search.num_expansions < 150


def test_a_filtered_search_streams(index: DiskANNIndex) -> None:
    options = SearchOptions(k=5, search_list_size=200, beam_width=1, gate=EmissionGate(0, 0))
    pools = []
    search = index.begin_search("q1", options, {"group": {"$in": ["g1", "g2", "g3"]}})
    while search.run() is not SearchStatus.FINISHED:
        pools.append(search.pool.nodes)
    assert len(pools) > 1
    assert all(node % 20 in (1, 2, 3) for pool in pools for node in pool)


def test_each_filter_finds_its_own_documents(index: DiskANNIndex) -> None:
    for number in (1, 2):
        for filter in ({"group": {"$in": iter([f"g{number}"])}}, MappingProxyType({"group": f"g{number}"})):
            found = index.search("q2", SearchOptions(k=5), filter)
            assert {chunk.metadata["group"] for chunk in found} == {f"g{number}"}


def test_a_filter_is_evaluated_once(index: DiskANNIndex) -> None:
    filter = {"group": {"$in": ["g1", "g2"]}}
    assert index.allowed(filter) is index.allowed(MetadataFilter(filter))
    assert index.allowed(None) is None
    for number in range(100):
        index.allowed({"number": number})
    assert len(index._allowed) <= 64


async def test_the_retriever_has_a_filter_and_a_question_may_have_another(index: DiskANNIndex) -> None:
    async with DiskANNRetriever(index, k=5, filter={"group": "g3"}) as retriever:
        own = [update async for update in retriever.stream("q2")][-1]
        other = [update async for update in retriever.stream("q2", filter={"group": "g4"})][-1]
    assert {chunk.metadata["group"] for chunk in own.chunks} == {"g3"}
    assert {chunk.metadata["group"] for chunk in other.chunks} == {"g4"}


def test_a_retriever_refuses_a_filter_that_its_index_cannot_answer(index: DiskANNIndex) -> None:
    with pytest.raises(ConfigurationError, match="no column 'colour'"):
        DiskANNRetriever(index, filter={"colour": "red"})


def test_a_number_compared_with_text_is_an_error_and_no_empty_answer(tmp_path: Path) -> None:
    documents = [{"text": f"document {n}", "year": str(2000 + n), "stars": n} for n in range(4)]
    with build_index(documents, tmp_path / "index", filterable=("year", "stars")) as index:
        assert len(index.search("document", filter={"year": "2001"})) == 1
        for wrong in (
            {"year": {"$gte": 2001}},
            {"year": 2001},
            {"stars": "3"},
            {"stars": {"$in": ["3"]}},
            {"stars": True},
        ):
            with pytest.raises(ConfigurationError, match="a CSV's columns are text"):
                index.search("document", filter=wrong)
