"""Embedders: what each returns, and how an endpoint that fails is borne with."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.diskann.build import build_index
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.search import SearchOptions
from stream2llm_sdk.retrievers.embedding import (
    EndpointEmbedder,
    SentenceTransformerEmbedder,
    SparseEmbedder,
    WordLlamaEmbedder,
    embedder_of,
)

pytestmark = pytest.mark.slow

TOPICS = ("a cat sat on the mat", "stock markets fell sharply", "the rocket left the launch pad", "bake bread at home")
KEY = "sk-very-secret-key"


class EmbeddingServer(ThreadingHTTPServer):
    """Answers `/v1/embeddings` as OpenAI does, rows in reverse order; `answers` may be put before."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Callable[[_Handler], None]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_active = self.max_active = 0
        self.delay_s = 0.0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that gave up


class _Handler(BaseHTTPRequestHandler):
    server: EmbeddingServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.num_active += 1
            self.server.max_active = max(self.server.max_active, self.server.num_active)
            self.server.requests.append(body)
            self.server.keys.append(self.headers["Authorization"])
            answer = self.server.answers.pop(0) if self.server.answers else _Handler.vectors
        time.sleep(self.server.delay_s)
        with self.server.lock:
            self.server.num_active -= 1
        self.body = body
        answer(self)

    def vectors(self) -> None:
        dim = self.body.get("dimensions", 5)
        rows = [
            {"object": "embedding", "index": row, "embedding": [float(len(text)), *([0.5] * (dim - 1))]}
            for row, text in enumerate(self.body["input"])
        ]
        self.send(200, json.dumps({"data": rows[::-1], "model": self.body["model"]}))

    def send(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def endpoint(server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointEmbedder]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with EndpointEmbedder("small", server.url, batch_size=4, concurrency=3, timeout_s=5) as embedder:
        yield embedder


def test_an_endpoint_gets_batches_several_at_a_time_and_keeps_the_order(
    server: EmbeddingServer, endpoint: EndpointEmbedder
) -> None:
    server.delay_s = 0.05
    texts = ["x" * (1 + row) for row in range(30)]
    vectors = endpoint.embed([*texts, "lone \ud800"])
    assert vectors.dtype == np.float32
    assert vectors[:, 0].tolist() == [*range(1, 31), 6]
    assert [len(request["input"]) for request in server.requests].count(4) == 7
    assert server.max_active == 3
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert endpoint.dim == 5
    assert endpoint.embed([]).shape == (0, 5)


def test_an_endpoint_that_fails_for_a_while_is_asked_again(server: EmbeddingServer, endpoint: EndpointEmbedder) -> None:
    server.answers = [
        lambda handler: handler.send(429, "slow down", Retry_After="0.01"),
        lambda handler: handler.send(503, "busy", Retry_After="0.02"),
        lambda handler: handler.connection.close(),
    ]
    assert endpoint.embed(["abc"])[0, 0] == 3
    assert len(server.requests) == 4


def test_an_endpoint_that_goes_on_failing_is_an_error_without_the_key(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with EndpointEmbedder("small", server.url, dim=5, api_key_env="MY_KEY", max_retries=2) as embedder:
        server.answers = [lambda handler: handler.send(500, f"key {KEY}", Retry_After="0")] * 3
        with pytest.raises(RetrievalError, match=r"after 3 tries: status 500: key \*\*\*") as error:
            embedder.embed(["a"])
        assert KEY not in f"{error.value} {embedder!r} {vars(embedder)}"
        server.answers = [lambda handler: handler.send(401, "who are you?")]
        with pytest.raises(RetrievalError, match="after 1 try: status 401: who are you"):
            embedder.embed(["a"])
        monkeypatch.delenv("MY_KEY")
        with pytest.raises(ConfigurationError, match="MY_KEY is not set"):
            embedder.embed(["a"])


@pytest.mark.parametrize(
    "answer",
    ["no json", "[]", '{"data": []}', '{"data": [{"index": 0}]}', '{"data": [{"index": 1, "embedding": [1]}]}'],
)
def test_an_answer_of_another_form_is_an_error(
    server: EmbeddingServer, endpoint: EndpointEmbedder, answer: str
) -> None:
    server.answers = [lambda handler: handler.send(200, answer)]
    with pytest.raises(RetrievalError, match="not of OpenAI's form"):
        endpoint.embed(["a"])


def test_shorter_vectors_are_asked_for(server: EmbeddingServer) -> None:
    with EndpointEmbedder("large", server.url, dimensions=8) as embedder:
        assert embedder.embed(["a", "b"]).shape == (2, 8)
        assert (embedder.dim, embedder.name) == (8, "endpoint:large:8")
    assert server.requests[0]["dimensions"] == 8


def test_an_index_names_its_endpoint_and_does_not_call_it_by_itself(
    server: EmbeddingServer, endpoint: EndpointEmbedder, tmp_path: Path
) -> None:
    texts = ["x" * (1 + row * row) for row in range(30)]
    build_index(texts, tmp_path / "index", embedder=endpoint).close()
    # Another's folder must not choose where questions and a key are sent.
    with pytest.raises(ConfigurationError, match=r"endpoint:small@http://127.*give it as embedder="):
        DiskANNIndex.open(tmp_path / "index")
    with DiskANNIndex.open(tmp_path / "index", embedder=endpoint) as index:
        assert index.search("y" * 5, SearchOptions(k=1))[0].text == "x" * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "ftp://host/v1"}, "http:// or https://"),
        ({"url": "https://user:pw@host/v1"}, "without a password, not 'https://host/v1'"),
        ({"model": ""}, "model=''"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"concurrency": 1000}, "concurrency=1000"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_endpoints_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EndpointEmbedder(**({"model": "m", "url": "http://127.0.0.1:1/v1"} | arguments))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers model with random weights and prompts of its own."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = ["[PAD]", "[UNK]", "query", "passage", ":", *sorted({word for text in TOPICS for word in text.split()})]
    raw = Tokenizer(WordLevel({word: row for row, word in enumerate(words)}, "[UNK]"))
    raw.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder / "bert")
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder / "bert")
    transformer = Transformer(str(folder / "bert"))
    pooling = Pooling(16)
    prompts = {"query": "query : ", "document": "passage : "}
    SentenceTransformer(modules=[transformer, pooling], prompts=prompts, device="cpu").save(str(folder / "tiny"))
    return folder / "tiny"


def test_a_sentence_transformers_model_embeds_questions_with_its_own_prompt(model_folder: Path, tmp_path: Path) -> None:
    embedder = SentenceTransformerEmbedder(str(model_folder), device="cpu")
    assert (embedder.name, embedder.dim) == ("sentence-transformers:tiny", 16)
    documents, questions = embedder.embed(TOPICS), embedder.embed_queries(TOPICS)
    assert documents.shape == (4, 16)
    assert not np.allclose(documents, questions, atol=1e-3)
    direct = embedder._model.encode([f"query : {text}" for text in TOPICS])
    assert np.allclose(questions, direct, atol=1e-5)
    assert embedder.embed(["lone \ud800"]).shape == (1, 16)
    build_index(TOPICS, tmp_path / "index", embedder=embedder).close()
    with DiskANNIndex.open(tmp_path / "index") as index:
        assert isinstance(index.embedder, SentenceTransformerEmbedder)
        assert np.allclose(index.embed_query(TOPICS[1]), questions[1] / np.linalg.norm(questions[1]), atol=1e-5)


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing'.*cannot load it"):
        SentenceTransformerEmbedder(str(tmp_path / "nothing")).load()


def words(row: int) -> str:
    random = np.random.default_rng(row)
    return " ".join(f"topic{row % 20}word{number}" for number in random.integers(0, 30, 40))


def test_the_sparse_embedder_finds_texts_by_their_words(tmp_path: Path) -> None:
    texts = [f"{words(row)} name{row}" for row in range(400)]
    embedder = SparseEmbedder.fit(texts, dim=64)
    assert embedder.name == SparseEmbedder.fit(iter(texts), dim=64).name
    vectors = embedder.embed(texts)
    assert vectors.shape == (400, 64)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = np.argsort(-(unit @ unit.T), axis=1)[:, 1:6]
    assert (nearest % 20 == np.arange(400)[:, None] % 20).mean() > 0.95
    assert not embedder.embed(["neverseen"]).any()
    assert np.isfinite(embedder.embed(["lone \ud800", "", texts[0] * 100])).all()
    build_index(texts, tmp_path / "index", embedder=embedder).close()
    with DiskANNIndex.open(tmp_path / "index") as index:
        assert index.embedder.name == embedder.name
        assert index.search(texts[33], SearchOptions(k=1))[0].text == texts[33]
    (tmp_path / "index" / "sparse.npz").write_bytes(b"damaged")
    with pytest.raises(IndexFormatError, match=r"sparse.npz"):
        DiskANNIndex.open(tmp_path / "index")


def test_too_few_texts_for_a_sparse_embedder_are_told() -> None:
    with pytest.raises(ConfigurationError, match=r"2 texts of .* too few for 64 dimensions"):
        SparseEmbedder.fit(["one", "two"], dim=64)
    with pytest.raises(ConfigurationError, match="0 texts"):
        SparseEmbedder.fit([])


def test_embedders_are_named_by_text(tmp_path: Path) -> None:
    assert isinstance(embedder_of("wordllama"), WordLlamaEmbedder)
    assert isinstance(embedder_of("sentence-transformers:any/model"), SentenceTransformerEmbedder)
    endpoint = embedder_of("endpoint:org/model@b@http://127.0.0.1:1/v1/")
    assert isinstance(endpoint, EndpointEmbedder)
    assert endpoint.spec == "endpoint:org/model@b@http://127.0.0.1:1/v1"
    for spec in ("", "word2vec", "sentence-transformers:", "endpoint:model", "sparse"):
        with pytest.raises(ConfigurationError, match=r"give wordllama, sentence-transformers:MODEL"):
            embedder_of(spec)
    with pytest.raises(IndexFormatError):
        embedder_of("sparse", tmp_path)


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("sentence_transformers", lambda: SentenceTransformerEmbedder("any").load()),
        ("sklearn.feature_extraction.text", lambda: SparseEmbedder.fit(["a", "b"])),
        ("wordllama", lambda: WordLlamaEmbedder().load()),
    ],
)
def test_a_missing_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, use: Callable[[], object]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match="pip install"):
        use()
