import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def calculator(expression: str) -> str:
    """Computes."""
    return "85"


async def main():
    model = OpenAILike(
        "policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    answer = await FunctionAgent(tools=[calculator], llm=model, system_prompt="Be brief.").run("How many?")
    assert str(answer) == "Answer: 85"


asyncio.run(main())
