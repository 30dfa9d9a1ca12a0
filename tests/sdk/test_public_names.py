"""Every public name is documented: what it is, and every argument, field and member of it."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stream2llm_sdk
import stream2llm_sdk.retrievers
import stream2llm_sdk.serving
import stream2llm_sdk.traces

from .doc_blocks import load_reference

pytestmark = pytest.mark.slow  # imports every part

reference = load_reference()

DOCUMENTED = sorted({package for packages in reference.REFERENCE.values() for package in packages})
# Packages whose names are for the SDK's own modules, or are those of the package above.
INTERNAL = {
    "stream2llm_sdk.display",
    "stream2llm_sdk.retrievers.adapters",
    "stream2llm_sdk.serving.swap",
}


def packages_with_names() -> set[str]:
    roots = (stream2llm_sdk, stream2llm_sdk.retrievers, stream2llm_sdk.serving, stream2llm_sdk.traces)
    found = {
        module.name
        for root in roots
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")
        if module.ispkg
    }
    return {name for name in found if getattr(importlib.import_module(name), "__all__", None)}


def test_the_reference_has_every_public_package() -> None:
    assert packages_with_names() - INTERNAL <= set(DOCUMENTED)


def explained(doc: str) -> set[str]:
    """What a docstring explains in its sections, and whatever it names in backticks."""
    names = set(re.findall(r"`(?:self\.)?(\w+)[^`]*`", doc))
    for section in re.finditer(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", f"{doc}\n", re.MULTILINE):
        for entry in re.findall(r"^    (\S[^:\n]*):(?: |$)", section[1], re.MULTILINE):
            names |= set(re.findall(r"\w+", entry))
    return names


def parameters(function: Callable[..., Any]) -> list[str]:
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def own_doc(kind: type) -> str:
    doc = kind.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{kind.__name__}(") else inspect.cleandoc(doc)  # what dataclasses write by themselves


def refers(doc: str) -> bool:
    """Whether the docstring says where the arguments are explained."""
    return re.search(r"see\s+`[\w.]+` for\s+the arguments", doc) is not None


def is_made_for_users(doc: str) -> bool:
    """Whether the class is called by those who use it; the docstring of others says what makes it."""
    return re.search(r"\b[Mm]ade by `", doc) is None and not refers(doc)


def to_explain(kind: type, doc: str) -> list[str]:
    """The members of an enumeration, the fields of a dataclass, or the arguments that make an object."""
    if issubclass(kind, enum.Enum):
        return list(kind.__members__)
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]
    makes = kind.__dict__.get("__init__")
    return parameters(makes) if makes is not None and is_made_for_users(doc) and not is_protocol(kind) else []


def is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def is_foreign(kind: type, name: str) -> bool:
    """Whether a method is that of another library's class, which explains it."""
    return any(name in base.__dict__ for base in kind.__mro__[1:] if not base.__module__.startswith("stream2llm_sdk"))


def missing_of_class(kind: type) -> Iterator[str]:
    doc = own_doc(kind)
    if not doc:
        yield "its docstring"
    yield from (name for name in to_explain(kind, doc) if name not in explained(doc))
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", member)  # of a class method or a static method
        if name.startswith("_") or not (isinstance(function, property) or inspect.isfunction(function)):
            continue
        member_doc = inspect.getdoc(getattr(kind, name)) or ""
        if not member_doc:
            yield f"{name}: its docstring"
        elif inspect.isfunction(function) and not is_foreign(kind, name) and not refers(member_doc):
            arguments = parameters(function)
            known = explained(member_doc) | explained(doc)
            # The only argument is what the sentence speaks of.
            yield from (f"{name}: {each}" for each in arguments if len(arguments) > 1 and each not in known)


def missing(package: str, name: str) -> list[str]:
    """What is not explained of a public name."""
    value = getattr(importlib.import_module(package), name)
    if inspect.isclass(value):
        return list(missing_of_class(value))
    if inspect.isfunction(value):
        doc = inspect.getdoc(value) or ""
        lacking = [] if refers(doc) else [each for each in parameters(value) if each not in explained(doc)]
        return lacking if doc else ["its docstring"]
    return [] if reference.data_doc(package, name) else ["the text under it"]


@pytest.mark.parametrize("package", DOCUMENTED)
def test_everything_public_is_explained(package: str) -> None:
    names = importlib.import_module(package).__all__
    lacking = [f"{name} lacks {', '.join(lacks)}" for name in names if (lacks := missing(package, name))]
    assert not lacking, "\n".join(["", *lacking])
