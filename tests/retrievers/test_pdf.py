"""The text of PDFs, which matplotlib writes here."""

from __future__ import annotations

import io

import pytest

from stream2llm_sdk.retrievers.web.convert import convert_page
from stream2llm_sdk.retrievers.web.page import ExtractionOptions

URL = "http://example.com/paper.pdf"


def pdf(*pages: str, title: str = "A paper") -> bytes:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with PdfPages(buffer, metadata={"Title": title, "CreationDate": None}) as document:
        for text in pages:
            figure = Figure(figsize=(8, 10))
            for number, line in enumerate(text.split("\n")):
                figure.text(0.05, 0.95 - 0.03 * number, line, fontsize=9)
            document.savefig(figure)
    return buffer.getvalue()


LONG = (
    "This line is long enough to be one that the width of the page has bro-\nken in the middle of a word and goes on."
)


def test_text_of_each_page_under_its_heading() -> None:
    texts = ["", "First thoughts.", "Then more.", "And again.", "The end."]
    body = pdf(*(f"Journal of tests, page {i}\n{texts[i]}\n{LONG}\nRest {texts[i]}\n{i}" for i in range(1, 5)))
    page = convert_page(body, URL, ExtractionOptions(), content_type="application/octet-stream")
    assert page.title == "A paper"
    assert dict(page.metadata) == {"num_pages": 4, "num_pages_read": 4}
    assert page.markdown.startswith("## Page 1\n\nFirst thoughts.\nThis line is long enough")
    assert "has broken in the middle of a word" in page.markdown
    assert "## Page 4\n\nThe end." in page.markdown
    assert "Journal" not in page.markdown


def test_pages_are_bounded_and_cut_to_the_question() -> None:
    pages = [f"About matter {i}.\n" + "Filler words that nobody asks for stand here.\n" * 20 for i in range(6)]
    pages[2] += "The lock is taken by acquire."
    options = ExtractionOptions(query="how is the lock acquired?", max_page_tokens=150, max_pdf_pages=5)
    page = convert_page(pdf(*pages), URL, options)
    assert dict(page.metadata) == {"num_pages": 6, "num_pages_read": 5}
    assert "taken by acquire" in page.markdown
    assert "## Page 3" in page.markdown
    assert "## Page 5" not in page.markdown


def test_pdfs_without_text_and_damaged_ones() -> None:
    page = convert_page(pdf("", ""), URL, ExtractionOptions())
    assert page.markdown == ""
    assert "may be scanned" in page.refusal
    for body in (b"%PDF-1.7\n", pdf("text")[:300]):
        with pytest.raises(ValueError, match="damaged"):
            convert_page(body, URL, ExtractionOptions())
