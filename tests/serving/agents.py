"""An agent of a framework that uses tools, run against a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest

if TYPE_CHECKING:
    from served import Served


def assert_an_agent_calls_a_tool(server: Served, model: str, named: Any) -> None:
    """`model` is the name of pydantic-ai's class for an endpoint, `named` a choice of the function
    `weather`, which is called again with what came of it.
    """
    agents = pytest.importorskip("pydantic_ai", reason="needs jackfield[dev]")
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    asked_for = []

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            made = getattr(models, model)("demo", provider=OpenAIProvider(openai_client=client))
            agent = agents.Agent(made, output_type=str, retries=0)

            @agent.tool_plain
            def weather(place: Literal["Rome", "Oslo"]) -> str:
                """The weather at a place."""
                asked_for.append(place)
                return "sunny"

            settings = {"max_tokens": 600, "extra_body": {"tool_choice": named}}
            limits = agents.UsageLimits(request_limit=2)
            await agent.run("What is the weather?", model_settings=settings, usage_limits=limits)

    with pytest.raises(agents.UsageLimitExceeded):  # it must call it for ever
        asyncio.run(run())
    assert len(asked_for) == 2
