import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: what.
    """
    return "85"


model = OpenAIServerModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
assert ToolCallingAgent(tools=[calculator], model=model, max_steps=4).run("How many?") == "85"
