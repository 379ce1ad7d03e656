"""The API reference, by pdoc, from the docstrings: python docs/reference/make.py FOLDER. A warning is an error."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

import pagedllm

# The public names are in the package itself; these modules define the others that calls give back or take.
MODULES = ("pagedllm.outputs", "pagedllm.errors", "pagedllm.jobs.report", "pagedllm.engine.core", "pagedllm.request")
ARGUMENT = re.compile(r"^(?=[a-z_]\w*(?:, \w+)*: )", re.MULTILINE)


def arguments_as_list(docstring: str) -> str:
    """Lines that begin with `name: ` become items, as our docstrings mean them."""
    first, *others = docstring.split("\n\n")
    return "\n\n".join([first, *(ARGUMENT.sub("- ", p) if ARGUMENT.match(p) else p for p in others)])


def adopt_mixins(public: type) -> None:
    """Methods that a public class has from a base of ours that is not public are documented as its own."""
    for base in public.__mro__[1:]:
        if base.__module__.startswith("pagedllm.") and base.__name__ not in pagedllm.__all__:
            for name, member in vars(base).items():
                if not name.startswith("_") and name not in vars(public):
                    setattr(public, name, member)


def make(folder: Path) -> None:
    for name in pagedllm.__all__:
        member = vars(pagedllm)[name] = getattr(pagedllm, name)  # loaded on first use otherwise, unseen by pdoc
        if isinstance(member, type):
            adopt_mixins(member)
    pdoc.render.configure(
        docformat="markdown",
        template_directory=Path(__file__).parent,
        show_source=False,
        footer_text=f"pagedllm {pagedllm.__version__}",
    )
    pdoc.render.env.filters["arguments_as_list"] = arguments_as_list
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("pagedllm", r"!pagedllm\..*", *MODULES, output_directory=folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
