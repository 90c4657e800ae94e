"""OpenHands' SDK, started as in its documentation: an agent with a terminal, and the question as its first message."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Answer the question on the command line."""
    from openhands.sdk import LLM, Agent, Conversation, Tool
    from openhands.tools.terminal import TerminalTool
    from pydantic import SecretStr

    key = SecretStr(os.environ["LLM_API_KEY"])
    llm = LLM(model=os.environ["LLM_MODEL"], base_url=os.environ["LLM_BASE_URL"], api_key=key, num_retries=0)
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
    conversation = Conversation(agent=agent, workspace=os.getcwd(), max_iteration_per_run=4)
    conversation.send_message(sys.argv[1])
    conversation.run()


if __name__ == "__main__":
    main()
