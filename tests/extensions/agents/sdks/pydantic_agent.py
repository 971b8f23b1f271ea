from pydantic_ai import Agent

agent = Agent("openai-chat:policy", instructions="Be brief.")


@agent.tool_plain
def calculator(expression: str) -> str:
    """Computes."""
    return "85"


assert agent.run_sync("How many?").output == "Answer: 85"
