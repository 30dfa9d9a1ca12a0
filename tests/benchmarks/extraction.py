"""Main-text extraction: ours beside what it could be, on real pages.

The pages are 18 of the documentation that Debian's packages install (`python3.11-doc postgresql-doc-15 git-doc
apache2-doc sqlite3-doc debian-reference-en debian-faq debian-policy`), 3 for each of 6 kinds of sites. What is main
text was decided by hand, and is kept as rules: the element that holds it and what to leave out of it, checked by
sentences that must and must not come out, and by code lines that must keep their indentation. Nothing of the pages is
stored here.
With ARTICLES set to a checkout of Scrapinghub's article-extraction-benchmark, its 181 news and blog pages are measured,
too.

Figures, for ours: `docs_f1` (words, as multisets, against the main text), `docs_ms` of CPU time a page, `code_lines`
(share kept whole), `rules_kept` (share of the sentences' rules), and `articles_f1`, `articles_ms`. The runs hold the
same for each extractor.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Measured, main
from lxml import html as lxml_html

DOC = Path("/usr/share/doc")
DECLARATION = re.compile(r"\A\s*<\?xml[^>]*>")


@dataclass(frozen=True)
class Site:
    """Where a kind of site has its main text."""

    main: str
    without: tuple[str, ...] = ()


SITES = {
    "Sphinx": Site("//div[@role='main']", (".//a[@class='headerlink']",)),
    "DocBook": Site("//div[@class='refentry' or @class='sect1' or @class='sect2']"),
    "AsciiDoc": Site("//body", ("./div[@id='footer']",)),
    "Apache": Site("//div[@id='page-content']", (".//div[@class='toplang']", ".//div[@id='quickview']",
                                                 ".//div[@class='top']")),
    "hand-written": Site("//body", (".//div[@class='nosearch']", ".//script", ".//style", ".//svg", ".//form",
                                    ".//div[@class='fancy_toc']")),
    "Debian": Site("//div[@class='chapter']|//div[@role='main']", (".//a[@class='headerlink']",
                                                                   ".//div[@class='toc']")),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A page, with sentences that must come out, sentences that must not, and code lines that must be whole."""

    site: str
    file: str
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


CASES = (
    Case("Sphinx", "python3.11-doc/html/library/asyncio-task.html",
         ("Coroutines declared with the async/await syntax is the preferred way",
          "Tasks are used to schedule coroutines"), ("Report a Bug", "Python Software Foundation"),
         ("    task1 = asyncio.create_task(", "        say_after(1, 'hello'))")),
    Case("Sphinx", "python3.11-doc/html/faq/programming.html",
         ("Why am I getting an UnboundLocalError when the variable has a value?",), ("Report a Bug",),
         ("...     global x", "...     print(x)")),
    Case("Sphinx", "python3.11-doc/html/tutorial/classes.html",
         ("Classes provide a means of bundling data and functionality together",), ("Report a Bug",),
         ("    def do_local():", "        self.data = []")),
    Case("DocBook", "postgresql-doc-15/html/sql-copy.html",
         ("COPY moves data between PostgreSQL tables and standard file-system files", "force_quote", "signature"),
         ("COMMIT PREPARED",), ("    FROM { 'filename' | PROGRAM 'command' | STDIN }",)),
    Case("DocBook", "postgresql-doc-15/html/datatype-numeric.html",
         ("smallserial", "1 to 9223372036854775807", "The type numeric can store numbers"), ("Monetary Types",)),
    Case("DocBook", "postgresql-doc-15/html/mvcc-intro.html",
         ("PostgreSQL provides a rich set of tools for developers to manage concurrent access to data",),
         ("Chapter 13. Concurrency Control",)),
    Case("AsciiDoc", "git-doc/git-rebase.html",
         ("Make a list of the commits which are about to be rebased", "Start an interactive"), ("Last updated",),
         ("          A---B---C topic", "    D---E---F---G master")),
    Case("AsciiDoc", "git-doc/gitglossary.html",
         ("A bare repository is normally an appropriately named directory", "octopus"), ("Last updated",)),
    Case("AsciiDoc", "git-doc/MyFirstContribution.html",
         ("This is a tutorial demonstrating the end-to-end workflow",), ("Last updated",),
         ("        printf(_(\"Pony saying hello goes here.\\n\"));",)),
    Case("Apache", "apache2-doc/manual/en/howto/auth.html",
         ("Authentication is any process by which you verify", "GroupName: rbowen dpitts sungo rshersey"),
         ("Available Languages", "Copyright 20")),
    Case("Apache", "apache2-doc/manual/en/mod/mod_rewrite.html",
         ("uses a rule-based rewriting engine", "RewriteBase"), ("Available Languages", "Copyright 20")),
    Case("Apache", "apache2-doc/manual/en/custom-error.html",
         ("Although the Apache HTTP Server provides generic error responses", "REDIRECT_URL"),
         ("Available Languages", "Copyright 20")),
    Case("hand-written", "sqlite3/whentouse.html",
         ("SQLite does not compete with client/server databases", "Application file format"),
         ("Small. Fast. Reliable",)),
    Case("hand-written", "sqlite3/lang_select.html",
         ("The SELECT statement is used to query the database",), ("Small. Fast. Reliable",)),
    Case("hand-written", "sqlite3/faq.html",
         ("How do I create an AUTOINCREMENT field?",), ("Small. Fast. Reliable",),
         ("INSERT INTO t1 VALUES(NULL,123);",)),
    Case("Debian", "../debian-reference/ch02.en.html",
         ("Debian is a volunteer organization which builds", "dist-upgrade"),
         ("Chapter 3. The system initialization",)),
    Case("Debian", "debian/FAQ/choosing.en.html",
         ("suited for their system and also answers possible questions",), ("Chapter 4. Compatibility issues",)),
    Case("Debian", "debian-policy/policy.html/ch-files.html",
         ("configuration file", "If two or more packages use the same configuration file"),
         ("Created using Sphinx",)),
)  # fmt: skip


def ours(page: str) -> str:
    from stream2llm_sdk.retrievers.web.convert import convert_html

    return convert_html(page, "http://localhost/page.html").markdown


def crawl4ai(page: str) -> str:
    """crawl4ai's Markdown of the page without navigation: what this project used before."""
    from crawl4ai.content_scraping_strategy import LXMLWebScrapingStrategy
    from crawl4ai.markdown_generation_strategy import DefaultMarkdownGenerator

    root = lxml_html.document_fromstring(DECLARATION.sub("", page))
    for element in list(root.iter("nav", "footer", "aside", "script", "style", "img", "svg")):
        element.drop_tree()
    text = (
        LXMLWebScrapingStrategy().scrap("http://localhost/", lxml_html.tostring(root, encoding="unicode")).cleaned_html
    )
    options = {"ignore_links": True, "ignore_images": True, "body_width": 0}
    return str(DefaultMarkdownGenerator(options=options).generate_markdown(text, citations=False).raw_markdown)


def trafilatura(page: str) -> str:
    from trafilatura import extract

    return extract(page, output_format="markdown", favor_recall=True, include_comments=False) or ""


def resiliparse(page: str) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    return str(extract_plain_text(page, main_content=True, preserve_formatting=True, alt_texts=False))


def readability(page: str) -> str:
    import html_to_markdown
    from readability import Document

    return html_to_markdown.convert(Document(DECLARATION.sub("", page)).summary()).content or ""


EXTRACTORS: dict[str, Callable[[str], str]] = {
    "ours": ours,
    "trafilatura": trafilatura,
    "resiliparse": resiliparse,
    "readability-lxml": readability,
    "crawl4ai": crawl4ai,
}


def main_text_by_hand(case: Case, page: str) -> str:
    root = lxml_html.document_fromstring(DECLARATION.sub("", page))
    site = SITES[case.site]
    element = root.xpath(site.main)[0]
    for rule in site.without:
        for unwanted in element.xpath(rule):
            unwanted.drop_tree()
    return " ".join(element.itertext())


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def f1(found: Counter[str], wanted: Counter[str]) -> float:
    common = (found & wanted).total()
    return 2 * common / max(found.total() + wanted.total(), 1)


def flat(text: str) -> str:
    """Without Markdown's marks and line breaks, for looking sentences up."""
    return " ".join(re.sub(r"[\\*`|>#]", "", text).split())


def articles() -> Iterator[tuple[str, str]]:
    folder = os.environ.get("ARTICLES")
    if folder:
        for name, truth in json.loads(Path(folder, "ground-truth.json").read_text()).items():
            page = gzip.decompress(Path(folder, "html", f"{name}.html.gz").read_bytes())
            yield page.decode(errors="replace"), truth["articleBody"]


def timed(extract: Callable[[str], str], page: str) -> tuple[str, float]:
    start = time.process_time()
    try:
        text = extract(page)
    except Exception as error:
        print(f"{extract.__name__}: {type(error).__name__}: {error:.100}", file=sys.stderr)
        text = ""
    return text, (time.process_time() - start) * 1e3


def measure_extractor(name: str, pages: list[tuple[Case, str, str]], news: list[tuple[str, str]]) -> dict[str, Any]:
    extract = EXTRACTORS[name]
    extract(pages[0][1])  # its imports
    scores: dict[str, list[float]] = {site: [] for site in SITES}
    milliseconds, code, rules = [], [], []
    for case, page, truth in pages:
        text, ms = timed(extract, page)
        milliseconds.append(ms)
        scores[case.site].append(f1(words(text), words(truth)))
        lines = [line.rstrip() for line in text.split("\n")]
        code += [any(line.endswith(wanted.rstrip()) for line in lines) for wanted in case.code]
        plain = flat(text).lower()
        rules += [flat(sentence).lower() in plain for sentence in case.wanted]
        rules += [flat(sentence).lower() not in plain for sentence in case.unwanted]
    outcome = {
        "extractor": name,
        "docs_f1": statistics.mean(score for site in scores.values() for score in site),
        "docs_ms": statistics.mean(milliseconds),
        "code_lines": statistics.fmean(code),
        "rules_kept": statistics.fmean(rules),
        **{f"f1 {site}": statistics.mean(values) for site, values in scores.items()},
    }
    if news:
        results = [(timed(extract, page), truth) for page, truth in news]
        outcome["articles_f1"] = statistics.mean(f1(words(text), words(truth)) for (text, _), truth in results)
        outcome["articles_ms"] = statistics.mean(ms for (_, ms), _ in results)
    return outcome


def measure() -> Measured:
    missing = [case.file for case in CASES if not (DOC / case.file).is_file()]
    if missing:
        packages = "python3.11-doc postgresql-doc-15 git-doc apache2-doc sqlite3-doc debian-reference-en debian-faq"
        raise SystemExit(f"missing: {missing[0]}; apt-get install --no-install-recommends {packages} debian-policy")
    pages = []
    for case in CASES:
        page = (DOC / case.file).read_text(encoding="utf-8", errors="replace")
        pages.append((case, page, main_text_by_hand(case, page)))
    news = list(articles())
    runs = [measure_extractor(name, pages, news) for name in EXTRACTORS]
    for run in runs:
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v:16}" for k, v in run.items()))
    figures = {name: value for name, value in runs[0].items() if isinstance(value, float) and " " not in name}
    return figures, runs


if __name__ == "__main__":
    os.environ.setdefault("CRAWL4AI_NO_CLOUD_NOTICE", "1")
    main(__doc__, measure)
