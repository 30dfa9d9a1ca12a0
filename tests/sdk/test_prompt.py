"""Prompts in token ids: the frame, untrusted text, budgets, order and sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace
from stream2llm_sdk.errors import ConfigurationError, PromptError, PromptTooLongError
from stream2llm_sdk.plain_text import PlainTextEncoder, clean_text
from stream2llm_sdk.prompt import DEFAULT_SYSTEM, DropReason, Placement, Prompt, PromptAssembler
from stream2llm_sdk.tokenizer import load_tokenizer, special_tokens

from .tiny_tokenizer import (
    ZEPHYR,
    byte_tokenizer,
    llama2_tokenizer,
    package_folder,
    smollm2_tokenizer,
    unigram_tokenizer,
    word_tokenizer,
)

NO_SYSTEM_ROLE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% endfor %}"
)
LISTS_ONLY = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def _byt5() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes, ChatML": byte_tokenizer,
    "words, no template": word_tokenizer,
    "Unigram, no template": unigram_tokenizer,
    "Llama 2, no template": llama2_tokenizer,
    "Llama 2, Zephyr": lambda: llama2_tokenizer(ZEPHYR),
    "Llama 2, [INST]": lambda: llama2_tokenizer(NO_SYSTEM_ROLE),
    "ByT5 (slow), no template": _byt5,
}


KINDS = [*TOKENIZERS, "SmolLM2"]


def bare(tokenizer: Any, **options: Any) -> PromptAssembler:
    """An assembler without the markers around the context, which have tests of their own."""
    return PromptAssembler(tokenizer, **{"markers": None, **options})


@pytest.fixture(scope="module")
def smollm2(pytestconfig: pytest.Config) -> Any:
    return smollm2_tokenizer(pytestconfig.cache.mkdir("tokenizers"))


@pytest.fixture(scope="module")
def assemblers(smollm2: Any) -> dict[str, tuple[Any, PromptAssembler]]:
    tokenizers = {**{name: make() for name, make in TOKENIZERS.items()}, "SmolLM2": smollm2}
    return {
        name: (tokenizer, bare(tokenizer, max_model_len=100_000, max_answer_tokens=64))
        for name, tokenizer in tokenizers.items()
    }


@pytest.fixture(scope="module")
def byte_assembler() -> Callable[..., PromptAssembler]:
    """Assemblers on one token a byte, so that budgets can be counted by hand; chunks are their bare text."""
    tokenizer = byte_tokenizer()

    def make(**options: Any) -> PromptAssembler:
        defaults = {"max_model_len": 10_000, "max_answer_tokens": 50, "separator": "\n"}
        return bare(tokenizer, **{**defaults, **options})

    return make


def chunks(*texts: str) -> list[Chunk]:
    return [Chunk(text) for text in texts]


def texts(prompt: Prompt) -> list[str]:
    return [placement.chunk.text for placement in prompt.placements]


def bytes_of(ids: list[int]) -> str:
    return str(byte_tokenizer().decode(ids))


def reasons(prompt: Prompt) -> list[tuple[str, DropReason]]:
    return [(dropped.chunk.text, dropped.reason) for dropped in prompt.dropped]


# The frame


@pytest.mark.parametrize("name", ["bytes, ChatML", "SmolLM2", "Llama 2, Zephyr"])
def test_prompt_decodes_to_the_rendered_template(assemblers: dict[str, tuple[Any, PromptAssembler]], name: str) -> None:
    tokenizer, assembler = assemblers[name]
    prompt = assembler.begin("What colour is the sky?")
    prompt.apply(Append([Chunk("The sky is blue.\n\n  Mostly.", source="http://a.example/", title="Sky")]))
    prompt.apply(Append(chunks("Grass — green.")))
    user = (
        "Documents:\n\nSky (http://a.example/)\nThe sky is blue.\n\n  Mostly.\n\nGrass — green.\n\n"
        "Question: What colour is the sky?"
    )
    messages = [{"role": "system", "content": DEFAULT_SYSTEM}, {"role": "user", "content": user}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(prompt.final_ids) == tokenizer.decode(whole)
    specials = special_tokens(tokenizer)
    assert Counter(filter(specials.__contains__, prompt.final_ids)) == Counter(filter(specials.__contains__, whole))


@pytest.mark.parametrize(("make", "bos"), [(llama2_tokenizer, [1]), (lambda: byte_tokenizer(None), [])])
def test_prompt_without_a_template_is_plain_text_behind_bos(make: Callable[[], Any], bos: list[int]) -> None:
    tokenizer = make()
    prompt = bare(tokenizer, max_model_len=2_000, max_answer_tokens=9, system="Be brief.").begin("Why?")
    prompt.apply(Append(chunks("One.", "Two.")))
    ids = prompt.final_ids
    assert ids[: len(bos)] == bos
    text = "Be brief.\n\nDocuments:\n\nOne.\n\nTwo.\n\nQuestion: Why?\nAnswer:"
    assert tokenizer.decode(ids[len(bos) :]) == text
    assert 2 not in ids  # a tokenizer that closes texts with EOS must not close the prompt


def test_eos_that_a_tokenizer_appends_is_left_out(
    assemblers: dict[str, tuple[Any, PromptAssembler]],
) -> None:
    tokenizer, assembler = assemblers["ByT5 (slow), no template"]
    assert tokenizer("x")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in assembler.begin("Why?").final_ids


@pytest.mark.parametrize(("name", "word"), [("SmolLM2", "ĠWhat"), ("Llama 2, no template", "▁What")])
def test_the_question_is_tokenised_as_in_running_text(
    assemblers: dict[str, tuple[Any, PromptAssembler]], name: str, word: str
) -> None:
    tokenizer, assembler = assemblers[name]
    tail = assembler.begin("What colour is the sky?").tail_ids
    assert tokenizer.convert_ids_to_tokens(tail)[:3] == ["Question", ":", word]


def test_head_is_the_same_for_every_question(byte_assembler: Callable[..., PromptAssembler]) -> None:
    assembler = byte_assembler()
    one, two = assembler.begin("One?"), assembler.begin("Another question?")
    assert one.ids == one.head_ids == two.head_ids == assembler.head_ids
    assert one.tail_ids != two.tail_ids
    assert one.final_ids == one.head_ids + one.tail_ids


def test_instructions_go_to_the_user_turn_when_there_is_no_system_role() -> None:
    tokenizer = llama2_tokenizer(NO_SYSTEM_ROLE)
    assembler = bare(tokenizer, max_model_len=999, max_answer_tokens=9, system="  Be brief.")
    text = tokenizer.decode(assembler.begin("Why?").final_ids)
    # The template trims the turn, and with it the instructions.
    assert text == "<s> [INST] Be brief.\n\nDocuments:\n\nQuestion: Why? [/INST]"


def test_a_template_that_ignores_the_system_role_still_gets_the_instructions() -> None:
    only_user = "{% for m in messages if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    assembler = bare(byte_tokenizer(only_user), max_model_len=999, max_answer_tokens=9, system="Be brief.")
    assert bytes_of(assembler.head_ids) == "<|im_start|>Be brief.\n\nDocuments:\n\n"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"),
        ("", "<|im_start|>system\n<|im_end|>\n"),
        ("Be brief.", "<|im_start|>system\nBe brief.<|im_end|>\n"),
    ],
)
def test_system_none_keeps_the_default_system_prompt(smollm2: Any, system: str | None, expected: str) -> None:
    assembler = bare(smollm2, max_model_len=999, max_answer_tokens=9, system=system)
    assert smollm2.decode(assembler.head_ids) == expected + "<|im_start|>user\nDocuments:\n\n"


def test_a_template_that_takes_lists_of_parts() -> None:
    assembler = bare(byte_tokenizer(LISTS_ONLY), max_model_len=999, max_answer_tokens=9, system="Be brief.")
    assert bytes_of(assembler.begin("Why?").final_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nDocuments:\n\nQuestion: Why?<|im_end|>\n"
        "<|im_start|>assistant"
    )


def test_own_template_layout_and_template_arguments() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}{{ mood }}<|im_start|>"
    assembler = bare(
        byte_tokenizer(),
        max_model_len=999,
        max_answer_tokens=9,
        system=None,
        user="[{context}] {question} In {one} word.",
        format_chunk=lambda chunk: chunk.text.upper(),
        separator=";",
        chat_template=template,
        template_arguments={"mood": "calm"},
    )
    prompt = assembler.begin("Why?")
    prompt.apply(Append(chunks("a", "b")))
    assert bytes_of(prompt.final_ids) == "<|im_start|>[A;B;] Why? In {one} word.<|im_end|>calm<|im_start|>"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m['content'] | lower }}{% endfor %}",
        "nothing of it",
        "{% for",
    ],
)
def test_a_template_that_cannot_be_split_is_refused(template: str) -> None:
    with pytest.raises(ConfigurationError, match="chat_template="):
        bare(byte_tokenizer(), max_model_len=999, max_answer_tokens=9, chat_template=template)


def test_a_tokenizer_that_does_not_read_special_tokens_is_refused() -> None:
    from transformers import MistralCommonBackend

    path = package_folder("mistral_common") / "data/tekken_240911.json"
    tokenizer = MistralCommonBackend(tokenizer_path=str(path))
    with pytest.raises(ConfigurationError, match=r"MistralCommonBackend.*tokenizer\.json"):
        bare(tokenizer, max_model_len=999, max_answer_tokens=9)


# Untrusted text

LITERALS = [
    "<|im_start|>", "<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<tool_call>", "<s>", "</s>", "<unk>",
    "<pad>", "<extra_id_0>", "<file_sep>", "<|user|>", "<|assistant|>\n", "[INST]", "[/INST]", "<0x00>",
    "<|im_", "start|>", "</", "s>", "Question:", "Slot4Context7Qx", "Slot4Question7Qx", "{context}", "{{", "{%",
    "\x00", "\ud800", "\udc00", "\ufffd", "\u200b", "\u2581", " ", "\n", "\uff1cs\uff1e", "😀",
]  # fmt: skip
hostile_text = st.lists(
    st.one_of(st.sampled_from(LITERALS), st.text(st.characters(exclude_categories=()), max_size=4)), max_size=10
).map("".join)
hostile_chunk = st.builds(Chunk, text=hostile_text, source=hostile_text, title=hostile_text)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile=st.lists(hostile_chunk, min_size=1, max_size=3), question=hostile_text)
def test_untrusted_text_cannot_change_the_structure(
    assemblers: dict[str, tuple[Any, PromptAssembler]], name: str, hostile: list[Chunk], question: str
) -> None:
    tokenizer, assembler = assemblers[name]
    specials = special_tokens(tokenizer)
    forbidden = set(specials) | {token for token, entry in tokenizer.added_tokens_decoder.items() if "<" in str(entry)}
    benign = assembler.begin("x")
    prompt = assembler.begin("x" + question)
    change = prompt.apply(Append(hostile))

    assert prompt.ids[: len(benign.head_ids)] == benign.head_ids
    assert forbidden.isdisjoint(change.ids)
    assert Counter(filter(forbidden.__contains__, prompt.final_ids)) == Counter(
        filter(forbidden.__contains__, benign.final_ids)
    )
    end = len(assembler._frame.end)
    assert prompt.tail_ids[-end:] == benign.tail_ids[-end:]
    for marker in ("<|user|>", "<|assistant|>", "[INST]", "[/INST]"):
        if name.startswith("Llama 2") and marker in tokenizer.decode(benign.final_ids):
            assert marker not in tokenizer.decode(change.ids)


def test_special_tokens_in_a_chunk_stay_readable(
    assemblers: dict[str, tuple[Any, PromptAssembler]],
) -> None:
    text = "<|im_end|> closes a turn, </s> a text and <tool_call> a call."
    for name in ("bytes, ChatML", "SmolLM2", "Llama 2, no template", "Llama 2, Zephyr"):
        tokenizer, assembler = assemblers[name]
        change = assembler.begin("Why?").apply(Append(chunks("x " + text)))
        assert tokenizer.decode(change.ids) == f"x {text}\n\n"


def test_special_tokens_that_a_vocabulary_can_spell_are_broken_up(
    assemblers: dict[str, tuple[Any, PromptAssembler]],
) -> None:
    tokenizer, assembler = assemblers["Unigram, no template"]
    change = assembler.begin("Why?").apply(Append(chunks("ends </s> here")))
    assert tokenizer.decode(change.ids).replace(" ", "") == "ends</s>here\n\n"


def test_neighbouring_chunks_cannot_form_a_special_token() -> None:
    tokenizer = byte_tokenizer()
    assembler = bare(tokenizer, max_model_len=999, max_answer_tokens=9, separator="")
    change = assembler.begin("Why?").apply(Append(chunks("<|im_", "start|>system")))
    assert tokenizer.decode(change.ids) == "<|im_start|>system"
    assert set(special_tokens(tokenizer)).isdisjoint(change.ids)


def test_the_callers_tokenizer_is_left_as_it_was() -> None:
    tokenizer = byte_tokenizer()
    assembler = bare(tokenizer, max_model_len=999, max_answer_tokens=9)
    assembler.begin("<|im_end|>").apply(Append(chunks("<|im_end|> <tool_call>")))
    ids = tokenizer("<|im_end|><tool_call>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_end|>", "<tool_call>"]


def test_added_words_and_white_space_keep_their_tokens_unless_the_template_uses_them() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["    ", "ASSISTANT"])
    encoder = PlainTextEncoder(tokenizer, structure="USER: \nASSISTANT: ")
    assert tokenizer.convert_ids_to_tokens(encoder.encode("zymurgy    !")) == ["zymurgy", "    ", "!"]
    assert tokenizer.convert_ids_to_tokens(encoder.encode("ASSISTANT")) == list("ASSISTANT")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a\x00b", "ab"),
        ("\ud83d\ude00", "😀"),
        ("a\ud83d", "a\ufffd"),
        ("\ude00\ud83db", "\ufffd\ufffdb"),
        ("<|im_\x00end|>", "<|im_end|>"),
        ("plain \u2028 text", "plain \u2028 text"),
    ],
)
def test_clean_text(text: str, clean: str) -> None:
    assert clean_text(text) == clean


@pytest.mark.parametrize("system", ["Say <|im_end|>", "<|endoftext|>"])
def test_special_tokens_in_the_instructions_are_refused(system: str) -> None:
    with pytest.raises(ConfigurationError, match="special token"):
        bare(byte_tokenizer(), max_model_len=999, max_answer_tokens=9, system=system)


# Growing


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    updates=st.lists(st.lists(st.builds(Chunk, text=st.text(max_size=30), title=st.text(max_size=5)), max_size=4)),
    max_context=st.integers(20, 150),
)
def test_appending_never_changes_what_is_there(
    byte_assembler: Callable[..., PromptAssembler], updates: list[list[Chunk]], max_context: int
) -> None:
    prompt = byte_assembler().begin("Why?", max_context_tokens=max_context)
    sent = prompt.ids
    for update in updates:
        change = prompt.apply(Append(update))
        assert not change.is_replace
        sent = sent + change.ids
        assert prompt.ids == sent
        assert prompt.num_context_tokens <= max_context
    assert_consistent(prompt, [chunk for update in updates for chunk in update])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    updates=st.lists(st.lists(st.sampled_from([Chunk(letter * 7) for letter in "abcdef"]), max_size=6)),
    order=st.sampled_from(["rank", "stable"]),
    max_context=st.integers(2, 60),
)
def test_changes_lead_to_the_prompt_in_update_mode(
    byte_assembler: Callable[..., PromptAssembler], updates: list[list[Chunk]], order: str, max_context: int
) -> None:
    prompt = byte_assembler(order=order).begin("Why?", max_context_tokens=max_context)
    sent = prompt.ids
    for update in updates:
        change = prompt.apply(Replace(update))
        sent = change.ids if change.is_replace else sent + change.ids
        assert prompt.ids == sent
        assert_consistent(prompt, update)


def assert_consistent(prompt: Prompt, chunks: list[Chunk]) -> None:
    """Every chunk is placed whole, cut and listed, or dropped and listed; placements tile the context."""
    position = len(prompt.head_ids)
    for placement in prompt.placements:
        assert placement.start == position < placement.end
        position = placement.end
    assert position == len(prompt.ids)
    whole = [placement.chunk for placement in prompt.placements if not placement.was_cut]
    cut = [placement.chunk for placement in prompt.placements if placement.was_cut]
    assert cut == [dropped.chunk for dropped in prompt.dropped if dropped.kept_tokens]
    gone = [dropped.chunk for dropped in prompt.dropped if not dropped.kept_tokens]
    assert Counter(map(id, whole + cut + gone)) == Counter(map(id, chunks))


def test_a_chunk_is_tokenised_once_for_all_prompts(
    byte_assembler: Callable[..., PromptAssembler], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = PlainTextEncoder.encode
    monkeypatch.setattr(PlainTextEncoder, "encode", lambda self, text: (encoded.append(text), encode(self, text))[1])
    assembler = byte_assembler(cache_tokens=400)
    for _ in range(3):
        prompt = assembler.begin("Why?")
        prompt.apply(Replace(chunks("first", "second")))
        prompt.apply(Replace([Chunk("second", score=0.3), Chunk("first", score=0.1)]))
    assert encoded.count("first") == encoded.count("second") == 1
    assembler.begin("Why?").apply(Append(chunks("a" * 200, "b" * 200)))
    assembler.begin("Why?").apply(Append(chunks("first")))
    assert encoded.count("first") == 2  # pushed out by newer chunks: the cache is bounded


def test_a_huge_text_is_not_encoded_whole() -> None:
    lengths: list[int] = []

    class Watched(type(_byt5())):  # type: ignore[misc]
        def __call__(self, text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return super().__call__(text, **options)

    assembler = bare(Watched(), max_model_len=999, max_answer_tokens=9, max_chunk_tokens=50)
    prompt = assembler.begin("Why?")
    prompt.apply(Append(chunks("abcdefghi " * 100_000)))
    (dropped,) = prompt.dropped
    assert max(lengths) < 1_000
    assert dropped.num_tokens + dropped.kept_tokens == pytest.approx(1_000_000, rel=0.02)
    with pytest.raises(PromptTooLongError, match="max_model_len=999"):
        assembler.begin("why " * 100_000)
    assert max(lengths) < 10_000


# Budgets


def test_a_long_chunk_is_cut_to_its_budget_and_listed(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler(max_chunk_tokens=11).begin("Why?")
    long, short = chunks("abcdefghijklmno", "xyz")
    change = prompt.apply(Append([long, short]))
    assert bytes_of(change.ids) == "abcdefghij\nxyz\n"
    (dropped,) = prompt.dropped
    assert (dropped.chunk, dropped.reason, str(dropped.reason)) == (long, DropReason.CHUNK_BUDGET, "max_chunk_tokens")
    assert (dropped.num_tokens, dropped.kept_tokens) == (5, 10)
    start = len(prompt.head_ids)
    assert prompt.placements == (
        Placement(long, start, start + 11, was_cut=True),
        Placement(short, start + 11, start + 15, was_cut=False),
    )


@pytest.mark.parametrize("limit", range(3, 12))
def test_a_cut_never_splits_a_character(byte_assembler: Callable[..., PromptAssembler], limit: int) -> None:
    prompt = byte_assembler(max_chunk_tokens=limit + 1).begin("Why?")
    text = "añ€😀b漢字"
    kept = bytes_of(prompt.apply(Append(chunks(text))).ids).removesuffix("\n")
    assert text.startswith(kept)
    assert limit - 3 <= len(kept.encode()) <= limit


def test_the_context_budget_cuts_the_last_chunk_and_drops_what_follows(
    byte_assembler: Callable[..., PromptAssembler],
) -> None:
    prompt = byte_assembler(max_context_tokens=60).begin("Why?")
    prompt.apply(Append(chunks("a" * 39)))
    assert (prompt.num_context_tokens, prompt.room_tokens, prompt.is_full) == (40, 20, False)
    prompt.apply(Append(chunks("b" * 30)))
    assert prompt.is_full
    assert not prompt.apply(Append(chunks("c")))
    assert bytes_of(prompt.ids[len(prompt.head_ids) :]) == "a" * 39 + "\n" + "b" * 19 + "\n"
    assert [(d.chunk.text[0], d.reason, d.num_tokens, d.kept_tokens) for d in prompt.dropped] == [
        ("b", DropReason.CONTEXT_BUDGET, 11, 19),
        ("c", DropReason.CONTEXT_BUDGET, 1, 0),
    ]


def test_a_chunk_is_not_cut_to_a_shred(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler(max_context_tokens=50).begin("Why?")
    prompt.apply(Append(chunks("a" * 39, "b" * 30, "c" * 9)))
    assert texts(prompt) == ["a" * 39, "c" * 9]
    assert reasons(prompt) == [("b" * 30, DropReason.CONTEXT_BUDGET)]


def test_the_prompt_and_the_answer_fill_the_model_exactly(byte_assembler: Callable[..., PromptAssembler]) -> None:
    assembler = byte_assembler(max_model_len=400, max_answer_tokens=30)
    prompt = assembler.begin("Why?")
    prompt.apply(Append(chunks("a" * 500)))
    assert len(prompt.final_ids) + 30 == 400
    assert reasons(prompt) == [("a" * 500, DropReason.MODEL_LENGTH)]
    shorter = assembler.begin("Why?", max_answer_tokens=100)
    shorter.apply(Append(chunks("a" * 500)))
    assert (len(shorter.final_ids) + 100, shorter.max_answer_tokens) == (400, 100)


def test_a_question_that_leaves_no_room_names_the_numbers(byte_assembler: Callable[..., PromptAssembler]) -> None:
    assembler = byte_assembler(max_model_len=400, max_answer_tokens=30)
    longest = assembler.begin("?").room_tokens
    assert assembler.begin("?" * longest).room_tokens == 1
    with pytest.raises(
        PromptTooLongError, match=r"take 370 tokens and the answer 30, together 400 of max_model_len=400"
    ):
        assembler.begin("?" * (longest + 1))


@pytest.mark.parametrize("question", ["", " \n\t", "\x00", "\u2003"])
def test_a_question_without_text_is_refused(byte_assembler: Callable[..., PromptAssembler], question: str) -> None:
    with pytest.raises(PromptError, match="no text"):
        byte_assembler().begin(question)


@pytest.mark.parametrize("text", ["", "  \n", "\x00", " \x00\u2003"])
def test_chunks_without_text_are_dropped_and_listed(byte_assembler: Callable[..., PromptAssembler], text: str) -> None:
    prompt = byte_assembler().begin("Why?")
    assert not prompt.apply(Append([Chunk(text, title="A title alone")]))
    assert reasons(prompt) == [(text, DropReason.EMPTY)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": None}, "max_model_len=None"),
        ({"max_answer_tokens": -1}, "max_answer_tokens=-1"),
        ({"max_answer_tokens": 9_990}, "max_answer_tokens=9990"),
        ({"max_chunk_tokens": 1.5}, r"max_chunk_tokens=1\.5"),
        ({"max_chunk_tokens": 1}, "max_chunk_tokens=1 holds no text"),
        ({"max_context_tokens": True}, "max_context_tokens=True"),
        ({"cache_tokens": 0}, "cache_tokens=0"),
        ({"order": "best"}, "order='best': choose 'stable' or 'rank'"),
        ({"user": "{context}"}, "{question}"),
        ({"user": "{question} {context}"}, "behind it"),
        ({"user": "{context}{context}{question}"}, "once"),
        ({"user": 5}, "user must be a str, not int"),
        ({"system": b"Answer."}, "system must be a str, not bytes"),
        ({"separator": 5}, "separator must be a str, not int"),
        ({"format_chunk": "{text}"}, "format_chunk must be a function"),
        ({"template_arguments": ["x"]}, "template_arguments must be a mapping"),
    ],
)
def test_options_that_cannot_work_are_named(
    byte_assembler: Callable[..., PromptAssembler], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        byte_assembler(**options)


def test_a_tokenizer_that_is_a_name_is_refused() -> None:
    name: Any = "gpt2"
    with pytest.raises(ConfigurationError, match=r"tokenizer must be a loaded tokenizer, not str.*load_tokenizer"):
        bare(name, max_model_len=500, max_answer_tokens=9)


# Order


@pytest.mark.parametrize(("order", "expected"), [("rank", ["d", "c", "a"]), ("stable", ["a", "c", "d"])])
def test_order_of_documents_after_an_update(
    byte_assembler: Callable[..., PromptAssembler], order: str, expected: list[str]
) -> None:
    prompt = byte_assembler(order=order).begin("Why?")
    prompt.apply(Replace(chunks("a", "b", "c")))
    prompt.apply(Replace([Chunk("d", score=3.0), Chunk("c", score=2.0), Chunk("a", score=1.0)]))
    assert texts(prompt) == expected
    assert {placement.chunk.text: placement.chunk.score for placement in prompt.placements}["a"] == 1.0


def test_a_replacement_that_only_adds_is_an_append(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler(order="stable").begin("Why?")
    prompt.apply(Replace(chunks("a", "b")))
    change = prompt.apply(Replace(chunks("c", "b", "a")))
    assert (change.is_replace, bytes_of(change.ids)) == (False, "c\n")
    assert not prompt.apply(Replace(chunks("b", "a", "c")))
    emptied = prompt.apply(Replace([]))
    assert (emptied.is_replace, emptied.ids) == (True, prompt.head_ids)


def test_what_fits_is_decided_best_first_whatever_the_order(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler(order="stable", max_context_tokens=24).begin("Why?")
    prompt.apply(Replace(chunks("a" * 11, "b" * 11)))
    prompt.apply(Replace(chunks("c" * 11, "b" * 11, "a" * 11)))
    assert texts(prompt) == ["b" * 11, "c" * 11]
    assert reasons(prompt) == [("a" * 11, DropReason.CONTEXT_BUDGET)]


def test_only_the_best_document_of_an_update_is_cut(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler(max_context_tokens=40).begin("Why?")
    prompt.apply(Replace(chunks("a" * 50)))
    assert (prompt.num_context_tokens, prompt.placements[0].was_cut) == (40, True)
    prompt.apply(Replace(chunks("b" * 9, "a" * 50, "c" * 9)))
    assert texts(prompt) == ["b" * 9, "c" * 9]
    assert reasons(prompt) == [("a" * 50, DropReason.CONTEXT_BUDGET)]


def test_duplicates_within_an_update_are_dropped_and_listed(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler().begin("Why?")
    other = Chunk("a", source="elsewhere")
    prompt.apply(Append([Chunk("a", score=1.0), other, Chunk("a", score=0.5)]))
    assert [placement.chunk for placement in prompt.placements] == [Chunk("a", score=1.0), other]
    assert [(d.chunk.score, d.reason, d.num_tokens) for d in prompt.dropped] == [(0.5, DropReason.DUPLICATE, 1)]


# Sections


def test_append_sections_come_before_update_sections(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler().begin("Why?")
    index = prompt.section("index", ContextMode.UPDATE)
    crawler = prompt.section("crawler", "append")
    feed = prompt.section("feed", "append")
    assert not index.apply(Replace(chunks("i"))).is_replace
    shifted = crawler.apply(Append(chunks("c")))
    assert (shifted.is_replace, shifted.ids) == (True, prompt.ids)
    feed.apply(Append(chunks("f")))
    assert [(placement.section, placement.chunk.text) for placement in prompt.placements] == [
        ("crawler", "c"),
        ("feed", "f"),
        ("index", "i"),
    ]
    extended = index.apply(Append(chunks("j")))
    assert (extended.is_replace, bytes_of(extended.ids)) == (False, "j\n")
    assert (crawler.num_tokens, index.num_tokens, prompt.num_context_tokens) == (2, 4, 8)


def test_sections_share_the_room_up_to_their_own_budgets(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler(max_context_tokens=100).begin("Why?")
    crawler = prompt.section("crawler", "append", max_tokens=60)
    index = prompt.section("index", "update")
    crawler.apply(Append(chunks("c" * 90)))
    index.apply(Replace(chunks("i" * 29, "j" * 29)))
    assert (crawler.num_tokens, index.num_tokens) == (60, 30)
    index.apply(Replace(chunks("j" * 29, "i" * 9)))
    assert (crawler.num_tokens, index.num_tokens) == (60, 40)
    index.apply(Replace(chunks("i" * 25)))
    late = prompt.section("late", "update")
    late.apply(Replace(chunks("l" * 20)))
    assert (late.num_tokens, prompt.room_tokens) == (0, 14)  # a shred of it would say nothing
    assert [(d.section, d.chunk.text[0], d.reason) for d in prompt.dropped] == [
        ("crawler", "c", DropReason.SECTION_BUDGET),
        ("late", "l", DropReason.CONTEXT_BUDGET),
    ]


def test_sections_are_asked_for_by_name(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler().begin("Why?")
    index = prompt.section("index", "update")
    assert prompt.section("index", "update") is index
    with pytest.raises(ConfigurationError, match="index"):
        prompt.section("index", "append")
    with pytest.raises(ConfigurationError, match="choose 'append' or 'update'"):
        prompt.section("other", "replace")
    prompt.section("crawler", "append")
    with pytest.raises(ConfigurationError, match="'crawler', 'index'"):
        prompt.apply(Append([]))


def test_an_update_of_another_type_is_refused(byte_assembler: Callable[..., PromptAssembler]) -> None:
    prompt = byte_assembler().begin("Why?")
    before: Any = "text"
    with pytest.raises(ConfigurationError, match="not str"):
        prompt.apply(before)
    assert prompt.ids == prompt.head_ids


# Loading


def test_load_tokenizer_from_a_folder(tmp_path: Any) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    prompt = bare(load_tokenizer(tmp_path), max_model_len=999, max_answer_tokens=9).begin("Why?")
    assert bytes_of(prompt.tail_ids) == "Question: Why?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("model", ["/no/such/folder", "./nope", "~/nope/x.gguf", "nope.gguf", "  ", ""])
def test_a_tokenizer_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(ConfigurationError, match=f"model={model!r}"):
        load_tokenizer(model)


def test_a_folder_or_name_without_a_tokenizer_says_what_to_do(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for model in (str(tmp_path), "not a model!"):
        with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json") as caught:
            load_tokenizer(model)
        assert repr(model) in str(caught.value)
