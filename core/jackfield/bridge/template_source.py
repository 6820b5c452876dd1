"""The source of a chat template: compiled once, and the names that it reads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from jinja2 import meta, nodes
from transformers.utils import chat_template_utils

from jackfield.bridge.template_sandbox import MOST, Environment

if TYPE_CHECKING:
    from jinja2 import Template


@functools.lru_cache(32)
def compiled(source: str) -> Template:
    """The template, in an environment of its own that meters what it makes."""
    # of another template: transformers' environment would compute this one's constants
    own = chat_template_utils._compile_jinja_template("").environment
    environment = Environment(own)
    environment.meter.left = MOST
    return environment.from_string(source)


@functools.lru_cache(32)
def _tree(source: str) -> nodes.Template:
    return compiled(source).environment.parse(source)


@functools.lru_cache(32)
def variables(source: str) -> frozenset[str]:
    """The variables that a template reads of whoever renders it."""
    environment = compiled(source).environment
    found = meta.find_undeclared_variables(_tree(source))
    return frozenset(found).difference(environment.globals)


@functools.lru_cache(32)
def keys(source: str) -> frozenset[str]:
    """The keys by which a template may look into messages: attributes, and texts in its code.

    Those of its own namespaces are none.
    """
    tree = _tree(source)
    own = {
        a.target.name
        for a in tree.find_all(nodes.Assign)
        if isinstance(a.target, nodes.Name) and _makes_namespace(a.node)
    }
    found = {
        node.attr
        for node in tree.find_all(nodes.Getattr)
        if not (isinstance(node.node, nodes.Name) and node.node.name in own)
    }
    texts = {c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)}
    return frozenset(found | texts)


@functools.lru_cache(32)
def literals(source: str) -> str:
    """The texts that a template may write: what stands outside of its code, and strings in it.

    They are joined by NUL, so that nothing is found across two of them.
    """
    tree = _tree(source)
    found = {node.data for node in tree.find_all(nodes.TemplateData)}
    found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(found))


def _makes_namespace(value: nodes.Node) -> bool:
    called = value.node if isinstance(value, nodes.Call) else None
    return isinstance(called, nodes.Name) and called.name == "namespace"
