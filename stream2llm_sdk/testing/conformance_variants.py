"""Checks with retrievers that the caller makes for them: such as fail, and such as find given texts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from stream2llm_sdk.context import Retriever
from stream2llm_sdk.errors import Stream2LLMError
from stream2llm_sdk.testing.conformance_parts import ConformanceParts, Factory, NotRun
from stream2llm_sdk.testing.stream_run import Broken, StreamRun, described, read

__all__ = ["VariantChecks"]

_ODD_TEXTS = {
    "plain": "text",
    "lone surrogates": "caf\udce9 \ud83d and so on",
    "control characters": "nul \x00, bell \x07, escape \x1b[2J",
    "line ends": "one\r\ntwo\u2028three\x85four",
    "other scripts": "مرحبا 你好 👩‍👩‍👧",
}


class VariantChecks(ConformanceParts):
    """Each says what it did, or raises `Broken` with what is wrong, or `NotRun` with what is not given."""

    async def failing_first(self) -> str:
        """What fails before it gave anything says so."""
        run = await self._fail(self._options.failing_first, "failing_first")
        if run.context:
            raise Broken(f"it gave {len(run.context)} chunks, though failing_first= is to fail before the first")
        return _how_it_failed(run)

    async def failing_later(self) -> str:
        """What fails after a first update gives that, and says so."""
        run = await self._fail(self._options.failing_later, "failing_later")
        if not run.context:
            raise Broken("what it had given before it failed was lost, or failing_later= fails before the first update")
        return f"{len(run.context)} chunks, then {_how_it_failed(run)}"

    async def _fail(self, factory: Factory | None, name: str) -> StreamRun:
        if factory is None:
            raise NotRun(f"give {name}=, a factory of a retriever that fails so")
        runs: list[StreamRun] = []

        async def fail() -> None:
            run: StreamRun = await self._within(read(retriever, self._options.query), "a stream that fails")
            runs.append(run)
            if run.error is not None and not isinstance(run.error, Exception):
                raise Broken(f"it raised {described(run.error)}, which is no Exception and passes all handlers")
            if run.gave_up_silently:
                raise Broken("it failed without a word: raise an error, or yield a SourceFailure")

        async with self.opened(factory) as retriever:
            await fail()  # what the first stream starts, the later ones use
            await self._no_growth(fail, "a stream that failed")
        return runs[-1]

    async def empty(self) -> str:
        """Nothing to find is no reason to fail in another way than with a RetrievalError."""
        try:
            async with self._over([]) as retriever:
                run = await self._within(read(retriever, self._options.query), "a stream of nothing")
        except Stream2LLMError as error:
            return f"refused: {described(error)}"
        if run.context:
            raise Broken(f"over no texts it gave {len(run.context)} chunks")
        if run.error is not None and not isinstance(run.error, Stream2LLMError):
            raise Broken(f"with nothing to find it raised {described(run.error)}")
        return "nothing found, nothing given" if run.error is None else f"refused: {described(run.error)}"

    async def odd_texts(self) -> str:
        """Text that is not clean UTF-8 comes through, or is reported."""
        return await self._texts({name: self._text(name, body) for name, body in _ODD_TEXTS.items()})

    async def huge_text(self) -> str:
        """A text of 1 MB comes through, whole or cut."""
        body = " ".join(f"Sentence {number} of a long page is here." for number in range(26_000))
        return await self._texts({"1 MB": self._text("1 MB", body)})

    async def _texts(self, texts: dict[str, str]) -> str:
        try:
            async with self._over(list(texts.values())) as retriever:
                run = await self._within(read(retriever, self._options.query), "a stream of odd texts")
        except Stream2LLMError as error:
            return f"refused: {described(error)}"
        if run.error is not None:
            if isinstance(run.error, Stream2LLMError):
                return f"refused: {described(run.error)}"
            raise Broken(f"it raised {described(run.error)}") from run.error
        run.check(retriever.mode)
        together = "\n".join(chunk.text for chunk in run.context)
        missing = [name for name in texts if _marker(name) not in together]
        if missing and not run.num_failures:
            raise Broken(f"text lost without a word: {', '.join(missing)}")
        came = f"{len(texts) - len(missing)} of {len(texts)} texts came through"
        return f"{came}, {run.num_failures} failures were reported" if missing else came

    def _text(self, name: str, body: str) -> str:
        return f"{self._options.query} {_marker(name)} {body}"

    def _over(self, texts: Sequence[str]) -> AbstractAsyncContextManager[Retriever]:
        over = self._options.over
        if over is None:
            raise NotRun("give over=, a function that makes a retriever over given texts")
        return self.opened(lambda: over(texts))


def _marker(name: str) -> str:
    return "kitmarker" + "".join(letter for letter in name if letter.isalnum())


def _how_it_failed(run: StreamRun) -> str:
    return described(run.error) if run.error is not None else f"{run.num_failures} SourceFailure"
