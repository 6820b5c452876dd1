"""The other side of OpenAI's protocol: talk with any server that speaks it, and measure it."""
