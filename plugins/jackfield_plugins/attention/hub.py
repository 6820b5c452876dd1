"""``hub``: any varlen kernel of the Hugging Face Hub, by repository and revision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jackfield import hookimpl
from jackfield.contracts import Attention, AttentionCapabilities
from jackfield_plugins.attention.sources import VARLEN_FEATURES, HubKernel, Source, VarlenAttention

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class HubOptions:
    """`repo` is `org/name`, `revision` a commit, tag or branch; its content is locked either way.

    `function` None: `flash_attn_varlen_func`, or `flash_attention_varlen`.
    """

    repo: str
    revision: str
    function: str | None = None

    def __post_init__(self) -> None:
        if not _REPOSITORY.fullmatch(self.repo):
            raise ValueError(f"repo must be 'organisation/name', not {self.repo!r}")


class HubAttention(VarlenAttention):
    """What a kernel can do is read off its parameters, then tried in a process of its own."""

    name = "hub"
    options = HubOptions
    capabilities = AttentionCapabilities(
        layouts=frozenset({"padded", "packed"}), features=VARLEN_FEATURES
    )

    def sources(self, options: HubOptions) -> Sequence[Source]:
        return [HubKernel(options.repo, options.revision, options.function)]


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [HubAttention()]
