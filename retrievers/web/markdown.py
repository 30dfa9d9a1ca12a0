"""A tree of main text as Markdown."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["to_markdown"]

_TRANSPARENT_TAGS = ("a", "form", "fieldset", "font", "center", "label", "span", "mark", "abbr", "noscript")
_KEPT_ATTRIBUTES = frozenset({"colspan", "rowspan", "start"})
_TRAILING_SPACE = re.compile(r"[^\S\n]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")


def to_markdown(root: Any) -> str:
    """Markdown with code blocks fenced and indented as they were; without links' targets and without images.

    The tree is changed.
    """
    import html_to_markdown
    from lxml import etree
    from lxml import html as lxml_html

    body = root.body if root.body is not None else root
    _drop_attributes(body)
    etree.strip_tags(body, *_TRANSPARENT_TAGS)
    options = html_to_markdown.ConversionOptions(
        extract_metadata=False,
        compact_tables=True,
        bullets="-",
        autolinks=False,
        skip_images=True,
        hidden_content="all",  # what is hidden was judged before
        preprocessing=html_to_markdown.PreprocessingOptions(enabled=False, remove_forms=False),
    )
    markdown = html_to_markdown.convert(lxml_html.tostring(body, encoding="unicode"), options).content or ""
    return _BLANK_LINES.sub("\n\n", _TRAILING_SPACE.sub("", markdown)).strip()


def _drop_attributes(body: Any) -> None:
    for element in body.iter("*"):
        for name in set(element.attrib) - _KEPT_ATTRIBUTES:
            del element.attrib[name]
